"""Evaluates one candidate: its best plan, or the reason why it has none.

``evaluator.Evaluator`` bounds and evaluates both kinds of candidates: pipelines, whose layouts are tried in the order of their bounds
(``layout_plans``), and data ranks with unequal shares. The result does not depend on the time that is to be beaten, as long as it is
faster.
"""
