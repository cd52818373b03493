"""Layouts of one micro-batch over all axes inside of the model: typed, then priced.

- ``layout``: a layout as data. It depends on a :class:`~autopar.planner.layouts.layout.LayoutKey`: samples of a micro-batch, ranks of
  ``cp`` and ``tp``, and data ranks that split experts.
- ``rank_graphs``: the graph of one rank before ``tp`` is applied.
- ``catalogue``: the optimal typings of a key under several prices of memory (a Lagrangian sweep, in which each price gives a point on the
  Pareto front of seconds against bytes). The rest of the planner uses its :class:`~autopar.planner.layouts.catalogue.Layouts`; processes
  exchange what it knows as one :class:`~autopar.planner.layouts.catalogue.LayoutMemo` for each key.
"""
