"""The typing of one graph on one mesh axis: the exact minimum of an energy over strategies and changes of type.

- ``energy``: costs in four parts, which are weighted last so that one problem serves a sweep of memory prices.
- ``elimination``: the solver, by bucket elimination (Dechter 1999) or, where tables would grow too large, by an integer program.
- ``strategy_energy`` and ``resharding``: the energy of some operators and of the changes of type between them.
- ``block_table``: the least cost of a block for all types at its boundary, and the prices of choices
  (:class:`~autopar.planner.sharding.block_table.AxisCosts`).
- ``block_chain``: the types at block boundaries, and all blocks by dynamic programming over their chain
  (:class:`~autopar.planner.sharding.block_chain.AxisSolver`).
- ``input_axes``: what may be split on the axes of samples and of the sequence.

Types are those of :mod:`autopar.plan.mesh`.
"""
