"""The search space: what may be chosen, which choices are pinned, and the candidates that the constraints leave.

:class:`~autopar.planner.space.space.Space` is read from ``search/*.toml``, :class:`~autopar.planner.space.pins.Pins` from the user's
texts. Each constraint has a name, a predicate and a remedy. All of them filter one table of combinations, whose rows become
:class:`~autopar.planner.space.candidates.Candidate`. If no row is left, the deletion filter (Chinneck and Dravnieks 1991) finds a
minimal set of constraints that conflict. Orders of node groups, unequal shares and offload multiply the candidates.
"""
