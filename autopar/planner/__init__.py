"""From a graph, a cluster and pins to a plan: the fastest one by the cost model that fits in memory, and a certificate of it.

Exact inside: one typing of the graph on one mesh axis is the minimum of an energy (``sharding``), and ``layouts`` has all axes of a
micro-batch. Branch and bound outside: ``space`` has the candidates, ``bounds`` what none of their plans can be faster than, ``stages``
cuts blocks into pipeline stages, ``evaluate`` finds a candidate's best plan, ``branch_and_bound`` says which have to be evaluated,
``studies`` shares that between machines, ``explain`` says why. ``search`` is one search as data,
:class:`autopar.planner.planner.Planner` the story.
"""
