"""Why this plan: its alternatives and what each would cost, notes for its reader, and the plan as data; or why there is none.

:func:`~autopar.planner.explain.reasons.compare` finds for each choice the nearest candidates with another value of it, and says
by their bounds, or by evaluating them, how much slower they are; one that is faster becomes the plan.
:func:`~autopar.planner.explain.answer.plan_of` writes a :class:`autopar.plan.plan.Plan`.
"""
