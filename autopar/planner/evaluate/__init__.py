"""One candidate to its best plan, or to the reason why it has none.

``evaluator.Evaluator`` bounds and evaluates candidates of both kinds: pipelines (layouts in the order of their bounds, each with the best
plan of ``layout_plans``) and data ranks with unequal shares. What an evaluation says does not depend on the time that was known to be
beaten, as far as it is faster than that.
"""
