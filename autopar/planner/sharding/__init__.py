"""The typing of one graph on one mesh axis: the exact minimum of an energy over strategies and changes of type.

A block is a table of its least cost over the types at its boundary (``block_table``), found by eliminating the variables of its energy one
by one (``strategy_energy``, ``elimination``; bucket elimination, Dechter 1999) or, where tables would be too large, by an integer program.
Blocks are put together by dynamic programming over their chain (:class:`~autopar.planner.sharding.block_chain.AxisSolver`). What choices
cost stands in :class:`~autopar.planner.sharding.block_table.AxisCosts`; costs have four parts that are weighted last, so that one problem
serves a sweep of memory prices (``energy``). ``input_axes`` says what may be chosen on the axes of samples and of the sequence. Types are
those of :mod:`autopar.plan.mesh`.
"""
