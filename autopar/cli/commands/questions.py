"""Other questions to the planner than the fastest plan: a verb each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.console import kept_dir, print_json, print_text, progress
from autopar.cli.make_plan import Output, check_output, save
from autopar.cli.options import (
    ClusterOption,
    GlobalBatch,
    Json,
    MaxStepTime,
    Model,
    Opaque,
    Optimizer,
    Pin,
    PrecisionOption,
    Sequence_,
    Space,
    split_pins,
)
from autopar.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from autopar.questions.ask import Ask
    from autopar.questions.sizing import Answer

LargestCluster = Annotated[
    str, typer.Option("--cluster", metavar="CLUSTER", help="The largest that is considered: DEVICE:NODESxPER_NODE.")
]
LargestBatch = Annotated[
    int, typer.Option("--global-batch", min=1, metavar="N", help="The largest that is considered.")
]
Price = Annotated[
    list[str] | None, typer.Option(metavar="DEVICE=P", help="Of one device for an hour; repeatable, one for each kind.")
]
OrCluster = Annotated[
    list[str] | None, typer.Option(metavar="CLUSTER", help="A cluster to choose from too, up to all of it; repeatable.")
]
Scale = Annotated[
    str,
    typer.Option(
        metavar="NAME=F,F,...",
        help="A number of the cluster and its factors, as link.bandwidth=0.5,1,2; also link.latency, node.bandwidth, "
        "network.bandwidth, device.memory, device.bandwidth, device.matmul, device.launch.",
    ),
]
Objectives = Annotated[
    str,
    typer.Option(metavar="A,B,...", help="Two or more of time, memory (left over), devices, price (with --price)."),
]
Step = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens by which sequences grow.")]


def smallest_cluster(
    model: Model,
    cluster: LargestCluster,
    global_batch: GlobalBatch,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: Space = "default",
    max_step_time: MaxStepTime = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the fewest devices with a plan within --max-step-time."""
    from autopar.questions.sizing import smallest_cluster as answer

    _answer(answer, output, as_json, model=model, cluster=cluster, global_batch=global_batch, seq=seq, precision=precision,
            optimizer=optimizer, pin=pin, opaque=opaque, space=space, max_step_time=max_step_time)  # fmt: skip


def cheapest_cluster(
    model: Model,
    cluster: LargestCluster,
    global_batch: GlobalBatch,
    price: Price = None,
    or_cluster: OrCluster = None,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: Space = "default",
    max_step_time: MaxStepTime = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the cluster on which a step costs least within --max-step-time."""
    from autopar.questions.sizing import cheapest_cluster as cheapest
    from autopar.questions.sizing import parse_prices

    prices = parse_prices(price or ())

    def answer(ask: Ask) -> Answer:
        return cheapest(ask, prices, or_cluster or ())

    _answer(answer, output, as_json, model=model, cluster=cluster, global_batch=global_batch, seq=seq, precision=precision,
            optimizer=optimizer, pin=pin, opaque=opaque, space=space, max_step_time=max_step_time)  # fmt: skip


def longest_sequence(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch,
    step: Step = 1024,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: Space = "default",
    max_step_time: MaxStepTime = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the longest sequence with a plan, in multiples of --step tokens."""
    from autopar.models.described import is_factory
    from autopar.questions.sizing import longest_sequence as longest

    if is_factory(model):
        raise UsageError(
            "The longest sequence cannot be searched for a factory, which decides the length",
            fix="Name a model as hf:TYPE or gpt:...",
        )

    def answer(ask: Ask) -> Answer:
        return longest(ask, step=step)

    _answer(answer, output, as_json, model=model, cluster=cluster, global_batch=global_batch, seq=None, precision=precision,
            optimizer=optimizer, pin=pin, opaque=opaque, space=space, max_step_time=max_step_time)  # fmt: skip


def largest_batch(
    model: Model,
    cluster: ClusterOption,
    global_batch: LargestBatch,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: Space = "default",
    max_step_time: MaxStepTime = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the largest batch that fits without gradient accumulation, of divisors and multiples of the number of devices."""
    from autopar.questions.sizing import largest_batch as answer

    _answer(answer, output, as_json, model=model, cluster=cluster, global_batch=global_batch, seq=seq, precision=precision,
            optimizer=optimizer, pin=pin, opaque=opaque, space=space, max_step_time=max_step_time)  # fmt: skip


def sweep(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch,
    scale: Scale,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: Space = "default",
    max_step_time: MaxStepTime = None,
    as_json: Json = False,
) -> None:
    """Find the fastest plan with a number of the cluster times each factor."""
    from autopar.questions.answers_as_text import render_sweep, sweep_summary
    from autopar.questions.sweep import parse_sweep
    from autopar.questions.sweep import sweep as swept_over

    name, factors = parse_sweep(scale)
    with progress("reading the model") as advance:
        ask = _ask(advance, model=model, cluster=cluster, global_batch=global_batch, seq=seq, precision=precision,
                   optimizer=optimizer, pin=pin, opaque=opaque, space=space, max_step_time=max_step_time)  # fmt: skip
        swept = swept_over(ask, name, factors)
    _print(as_json, lambda: sweep_summary(name, swept), lambda: render_sweep(name, swept))


def pareto(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch,
    objectives: Objectives = "time,memory",
    price: Price = None,
    or_cluster: OrCluster = None,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: Space = "default",
    max_step_time: MaxStepTime = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the plans that no other one beats in all objectives; -o writes the fastest of them."""
    from autopar.questions.answers_as_text import front_summary, render_front
    from autopar.questions.pareto import front, parse_objectives
    from autopar.questions.sizing import parse_prices

    check_output(output)
    wanted, prices = parse_objectives(objectives), parse_prices(price or ())
    if prices and "price" not in wanted:
        raise UsageError(
            f"--price does not go with --objectives {objectives}",
            fix=f"Leave it out, or ask for --objectives {objectives},price",
        )
    with progress("reading the model") as advance:
        ask = _ask(advance, model=model, cluster=cluster, global_batch=global_batch, seq=seq, precision=precision,
                   optimizer=optimizer, pin=pin, opaque=opaque, space=space, max_step_time=max_step_time)  # fmt: skip
        points = front(ask, wanted, prices, or_cluster or ())
    _print(as_json, lambda: front_summary(points), lambda: render_front(points))
    if output is not None:
        save(points[0].plan, output)


def _answer(answer: Callable[[Ask], Answer], output: Path | None, as_json: bool, **given: Any) -> None:
    """Ask, print the answer and write its plan."""
    from autopar.questions.answers_as_text import answer_summary, render_answer

    check_output(output)
    with progress("reading the model") as advance:
        found = answer(_ask(advance, **given))
    _print(as_json, lambda: answer_summary(found), lambda: render_answer(found))
    if output is not None:
        save(found.plan, output)


def _ask(
    advance: Callable[[str, int, int], None],
    *,
    model: str,
    cluster: str,
    global_batch: int,
    seq: int | None,
    precision: str,
    optimizer: str,
    pin: list[str] | None,
    opaque: list[str] | None,
    space: str,
    max_step_time: float | None,
) -> Ask:
    """The options that all questions have."""
    from autopar.planner.branch_and_bound.process_group import cores
    from autopar.questions.ask import Ask, tracer

    names = tuple(opaque or ())
    return Ask(
        graph_at=tracer(model, precision=precision, opaque=names, cache_dir=kept_dir()),
        cluster=cluster,
        global_batch_size=global_batch,
        sequence=seq,
        pins=tuple(split_pins(pin or ())),
        precision=precision,
        optimizer=optimizer,
        space=space,
        max_step_time_s=max_step_time,
        opaque=names,
        cache_dir=kept_dir(),
        progress=advance,
        processes=cores(),
    )


def _print(as_json: bool, summary: Callable[[], object], text: Callable[[], str]) -> None:
    if as_json:
        print_json(summary())
    else:
        print_text(text())
