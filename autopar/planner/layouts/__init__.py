"""Layouts of one micro-batch over all axes inside of the model: typed, then priced.

A layout depends on a :class:`~autopar.planner.layouts.layout.LayoutKey`: samples of a micro-batch, ranks of ``cp`` and ``tp``, data
ranks that split experts. :class:`~autopar.planner.layouts.rank_graphs.RankGraphs` has the graph of one rank before ``tp``,
:class:`~autopar.planner.layouts.catalogue.Layouts` its exact typings under several prices of memory (a Lagrangian sweep: each
price gives a point of the front of seconds against bytes). It is what the rest of the planner asks: ``typed``, ``price``, ``unsplit``,
``on_device``. What it knows of a key is one :class:`~autopar.planner.layouts.catalogue.LayoutMemo`, which processes exchange.
"""
