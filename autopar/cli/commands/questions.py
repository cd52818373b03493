"""Other questions to the planner than the fastest plan: a verb each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.console import kept_dir, print_json, print_text, progress
from autopar.cli.make_plan import check_output, save
from autopar.cli.options import Asked, asks
from autopar.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

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


@asks(cluster=LargestCluster)
def smallest_cluster(asked: Asked) -> None:
    """Find the fewest devices with a plan within --max-step-time."""
    from autopar.questions.sizing import smallest_cluster as answer

    _answer(answer, asked)


@asks(cluster=LargestCluster)
def cheapest_cluster(asked: Asked, price: Price = None, or_cluster: OrCluster = None) -> None:
    """Find the cluster on which a step costs least within --max-step-time."""
    from autopar.questions.sizing import cheapest_cluster as cheapest
    from autopar.questions.sizing import parse_prices

    prices = parse_prices(price or ())
    _answer(lambda ask: cheapest(ask, prices, or_cluster or ()), asked)


@asks(without=("seq",))
def longest_sequence(asked: Asked, step: Step = 1024) -> None:
    """Find the longest sequence with a plan, in multiples of --step tokens."""
    from autopar.models.described import is_factory
    from autopar.questions.sizing import longest_sequence as longest

    if is_factory(asked.model):
        raise UsageError(
            "The longest sequence cannot be searched for a factory, which decides the length",
            fix="Name a model as hf:TYPE or gpt:...",
        )
    _answer(lambda ask: longest(ask, step=step), asked)


@asks(global_batch=LargestBatch)
def largest_batch(asked: Asked) -> None:
    """Find the largest batch that fits without gradient accumulation, of divisors and multiples of the number of devices."""
    from autopar.questions.sizing import largest_batch as answer

    _answer(answer, asked)


@asks(without=("output",))
def sweep(asked: Asked, scale: Scale) -> None:
    """Find the fastest plan with a number of the cluster times each factor."""
    from autopar.questions.answers_as_text import render_sweep, sweep_summary
    from autopar.questions.sweep import parse_sweep
    from autopar.questions.sweep import sweep as swept_over

    name, factors = parse_sweep(scale)
    with progress("reading the model") as advance:
        swept = swept_over(_ask(advance, asked), name, factors)
    _print(asked, lambda: sweep_summary(name, swept), lambda: render_sweep(name, swept))


@asks()
def pareto(
    asked: Asked, objectives: Objectives = "time,memory", price: Price = None, or_cluster: OrCluster = None
) -> None:
    """Find the plans that no other one beats in all objectives; -o writes the fastest of them."""
    from autopar.questions.answers_as_text import front_summary, render_front
    from autopar.questions.pareto import front, parse_objectives
    from autopar.questions.sizing import parse_prices

    check_output(asked.output)
    wanted, prices = parse_objectives(objectives), parse_prices(price or ())
    if prices and "price" not in wanted:
        raise UsageError(
            f"--price does not go with --objectives {objectives}",
            fix=f"Leave it out, or ask for --objectives {objectives},price",
        )
    with progress("reading the model") as advance:
        points = front(_ask(advance, asked), wanted, prices, or_cluster or ())
    _print(asked, lambda: front_summary(points), lambda: render_front(points))
    if asked.output is not None:
        save(points[0].plan, asked.output)


def _answer(answer: Callable[[Ask], Answer], asked: Asked) -> None:
    """Ask, print the answer and write its plan."""
    from autopar.questions.answers_as_text import answer_summary, render_answer

    check_output(asked.output)
    with progress("reading the model") as advance:
        found = answer(_ask(advance, asked))
    _print(asked, lambda: answer_summary(found), lambda: render_answer(found))
    if asked.output is not None:
        save(found.plan, asked.output)


def _ask(advance: Callable[[str, int, int], None], asked: Asked) -> Ask:
    from autopar.planner.branch_and_bound.process_group import cores
    from autopar.questions.ask import Ask, tracer

    names = tuple(asked.opaque or ())
    return Ask(
        graph_at=tracer(asked.model, precision=asked.precision, opaque=names, cache_dir=kept_dir()),
        cluster=asked.cluster,
        global_batch_size=asked.global_batch,
        sequence=asked.seq,
        pins=tuple(asked.pins),
        precision=asked.precision,
        optimizer=asked.optimizer,
        space=asked.space,
        max_step_time_s=asked.max_step_time,
        opaque=names,
        cache_dir=kept_dir(),
        progress=advance,
        processes=cores(),
    )


def _print(asked: Asked, summary: Callable[[], object], text: Callable[[], str]) -> None:
    if asked.as_json:
        print_json(summary())
    else:
        print_text(text())
