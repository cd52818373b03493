"""``autopar estimate``: the plan that pins describe, predicted."""

from __future__ import annotations

from autopar.cli.make_plan import Output, check_output, give, make_plan
from autopar.cli.options import (
    ClusterOption,
    GlobalBatch,
    Json,
    Model,
    Opaque,
    Optimizer,
    Pin,
    PrecisionOption,
    Sequence_,
    Space,
    split_pins,
)


def estimate(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: Space = "default",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict the plan that the pins describe, without a search over what they leave open."""
    check_output(output)
    plan = make_plan(
        "estimate",
        model,
        cluster=cluster,
        global_batch_size=global_batch,
        sequence=seq,
        precision=precision,
        optimizer=optimizer,
        pins=split_pins(pin or ()),
        opaque=opaque or [],
        space=space,
    )
    give(plan, output, as_json)
