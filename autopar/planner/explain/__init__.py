"""The explanation of a search: the alternatives to a plan, notes for its reader, the plan as data, or the reason why there is none.

:func:`~autopar.planner.explain.reasons.compare` finds for each choice the nearest candidates with another value of it. It bounds or
evaluates them to say how much slower they are; one that is faster becomes the plan.
:func:`~autopar.planner.explain.answer.plan_of` writes a :class:`autopar.plan.plan.Plan`.
"""
