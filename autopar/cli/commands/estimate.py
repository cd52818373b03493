"""``autopar estimate`` and ``explain``, and what they share with ``autopar search``: commands that make plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autopar.cli.console import cache_dir, print_json, print_text, progress, warn
from autopar.cli.graph_cache import traced
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
    is_factory,
    parse_cluster,
    split_pins,
)
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")]


def estimate(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
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
        options={},
    )
    give(plan, output, as_json)


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    why_not: Annotated[
        list[str] | None,
        typer.Option("--why-not", metavar="K=V,...", help="Compare with the best plan under these pins."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model, where the plan's name does not say it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say why a plan was chosen, and how the best plan with other pins would compare."""
    from autopar.plan.file import load_plan
    from autopar.report.compare import comparison, render_comparison

    plan = load_plan(plan_file)
    if not why_not:
        if as_json:
            print_json({"reasons": list(plan.search.reasons), "pins": list(plan.pins), "notes": list(plan.notes)})
        else:
            print_text("\n".join(plan.search.reasons) or "the plan records no reasons")
        return
    pins = split_pins(why_not)
    name = model or model_of(plan, plan_file)
    changed = {pin_key(pin) for pin in pins}
    other = make_plan(
        "search",
        name,
        cluster=plan.cluster,
        global_batch_size=plan.global_batch_size,
        sequence=sequence_of(plan, name),
        precision=plan.precision.name,
        optimizer=plan.optimizer,
        pins=[*(pin for pin in plan.pins if pin_key(pin) not in changed), *pins],
        opaque=list(plan.opaque),
        options={},
    )
    if as_json:
        print_json({"why_not": pins, **comparison(plan, other)})
    else:
        print_text(render_comparison(plan, other, names=(str(plan_file), ", ".join(pins))))


def pin_key(pin: str) -> str:
    """What a pin is about.

    >>> pin_key("tp<=4"), pin_key("recompute=full@layers.0-3")
    ('tp', 'recompute')
    """
    return re.split(r"[<>=!]", pin, maxsplit=1)[0].strip()


def model_of(plan: Plan, plan_file: Path) -> str:
    """The MODEL that a plan was made from, where its name says it.

    Raises:
        UsageError: the plan was made in Python for a model without such a name.
    """
    if ":" not in plan.model.name:
        raise UsageError("the plan names its model as MODEL of the command line", value=repr(plan.model.name),
                         place=str(plan_file), remedy="say which model with --model")  # fmt: skip
    return plan.model.name


def sequence_of(plan: Plan, model: str) -> int | None:
    """``--seq`` of a plan's model; None for a factory and for a model that does not take tokens."""
    tokens = plan.model.tokens_per_sample
    return None if is_factory(model) or tokens < 2 else tokens


def make_plan(
    verb: Literal["search", "estimate"],
    model: str,
    *,
    cluster: str,
    global_batch_size: int,
    sequence: int | None,
    precision: str,
    optimizer: str,
    pins: list[str],
    opaque: list[str],
    options: dict[str, Any],
) -> Plan:
    """Resolve the model and the cluster, then call ``autopar.api``'s ``verb``.

    Raises:
        AutoparError: of any of these parts.
    """
    found = parse_cluster(cluster)
    with progress("reading the model") as advance:
        from autopar import api
        from autopar.planner.space.pins import Pins

        graph = traced(
            model,
            sequence=sequence,
            precision=precision,
            opaque=tuple(dict.fromkeys((*opaque, *Pins.parse(pins).opaque))),
            global_batch_size=global_batch_size,
            advance=advance,
        )
        call: Callable[..., Plan] = api.search if verb == "search" else api.estimate
        return call(
            graph,
            cluster=found,
            global_batch_size=global_batch_size,
            precision=precision,
            optimizer=optimizer,
            pins=pins,
            opaque=opaque,
            progress=advance,
            cache_dir=cache_dir() or Path.home() / ".cache" / "autopar",
            **options,
        )


def check_output(output: Path | None) -> None:
    """Before a search: its plan can be written.

    Raises:
        UsageError: it cannot.
    """
    from autopar.util.files import check_writable

    if output is not None:
        check_writable(output)


def give(plan: Plan, output: Path | None, as_json: bool) -> None:
    """Write the plan where it is asked for, and print it."""
    if output is not None:
        save(plan, output)
    if as_json:
        from autopar.report.json_summary import plan_summary

        print_json(plan_summary(plan))
    else:
        from autopar.plan.text import render_plan

        print_text(render_plan(plan))


def save(plan: Plan, output: Path) -> None:
    """Write the plan and say so."""
    from autopar.plan.file import save_plan

    save_plan(plan, output)
    warn(f"wrote {output}")
