"""What may be chosen: search spaces, pins, and the candidates that named constraints leave.

:class:`~autopar.planner.space.space.Space` is read from ``search/*.toml``, :class:`~autopar.planner.space.pins.Pins` from a person's
texts. Each constraint is a row of name, check and remedy; all of them filter one table of combinations, whose rows are
:class:`~autopar.planner.space.candidates.Candidate`. Where none is left, the deletion filter (Chinneck and Dravnieks 1991) gives a
smallest set of constraints that conflict. Orders of node groups, unequal shares and offload multiply the candidates.
"""
