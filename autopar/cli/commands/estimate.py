"""``autopar estimate``: the plan that pins describe, predicted."""

from __future__ import annotations

from autopar.cli.make_plan import check_output, give, make_plan
from autopar.cli.options import Asked, asks


@asks(without=("max_step_time",))
def estimate(asked: Asked) -> None:
    """Predict the plan that the pins describe, without a search over what they leave open."""
    check_output(asked.output)
    give(make_plan("estimate", asked), asked.output, asked.as_json)
