"""The planner: from a graph, a cluster and pins to the fastest plan by the cost model that fits in memory, with a certificate.

The inner problems are solved by exact methods: the typing of the graph on one mesh axis is the minimum of an energy (``sharding``), and
``layouts`` combines the axes of a micro-batch. The outer problem is a branch and bound: ``space`` has the candidates, ``bounds`` their
lower bounds, ``stages`` cuts blocks into pipeline stages, ``evaluate`` finds a candidate's best plan, ``branch_and_bound`` chooses which
candidates to evaluate, ``studies`` shares a search between machines, ``explain`` gives the reasons. ``search`` has the data of a search,
:class:`autopar.planner.planner.Planner` its steps.
"""
