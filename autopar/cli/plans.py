"""Commands that make plans: ``autopar search``, ``estimate``, ``explain``, a command for each other question, and ``published``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autopar.cli.options import (
    Json,
    ModelOfPlan,
    PlanOptions,
    Space,
    kept_dir,
    parse_cluster,
    print_result,
    progress,
    refuse_beside,
    split_pins,
    takes_plan_options,
    warn,
)
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.questions.sizing import Answer, Ask


def make_plan(verb: Literal["search", "estimate"], plan_options: PlanOptions, **options: Any) -> Plan:
    """Trace the model, read the cluster, and search or estimate a plan by ``autopar.api``.

    Args:
        verb: the function of ``autopar.api``.
        plan_options: the options that commands have in common.
        options: further arguments of that function.

    Raises:
        AutoparError: any of these steps failed.
    """
    request = plan_options.request | {"cluster": parse_cluster(plan_options.cluster)}
    with progress("reading the model") as advance:
        from autopar import api

        ask = _ask(advance, plan_options)
        graph = ask.graph_at(ask.global_batch_size, ask.sequence)
        call: Callable[..., Plan] = api.search if verb == "search" else api.estimate
        return call(graph, **request, progress=advance, **options)


def check_output(output: Path | None) -> None:
    """Check before a search that its plan can be written to this file; None is no file.

    Raises:
        UsageError: it cannot.
    """
    from autopar.util.files import check_writable

    if output is not None:
        check_writable(output)


def save_and_print(plan: Plan, output: Path | None, as_json: bool) -> None:
    """Write the plan if a file is given, and print it."""
    from autopar.plan.text import render_plan
    from autopar.report.summaries import plan_summary

    with saved(plan, output):
        print_result(as_json, lambda: plan_summary(plan), lambda: render_plan(plan))


@contextmanager
def saved(plan: Plan, output: Path | None) -> Iterator[None]:
    """Write the plan if a file is given, and say so on stderr; the body prints the result, even if the file cannot be written."""
    try:
        if output is not None:
            plan.save(output)
            warn(f"wrote {output}")
    finally:
        yield


Trials = Annotated[int | None, typer.Option(min=1, metavar="N", help="Largest number of trials.")]
Timeout = Annotated[float | None, typer.Option(min=0, metavar="S", help="Longest search in seconds.")]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Optuna storage in which trials are kept, for a later search or other machines: sqlite:///study.db, "
        "postgresql://user@host/database, journal:///study.log.",
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the study in --storage; made from what is searched if not given."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of processes, on which the plan does not depend; if not given, one for each core, at most 4, or 1 with --storage.",
    ),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Sample the candidates by tpe, cmaes or nsga2, or never (none); if not given, as the space says.",
    ),
]
SamplerSeed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the sampler.")]


@takes_plan_options()
def search(
    plan_options: PlanOptions,
    trials: Trials = None,
    timeout: Timeout = None,
    storage: Storage = None,
    study_name: StudyName = None,
    workers: Workers = None,
    sampler: Sampler = None,
    sampler_seed: SamplerSeed = 0,
) -> None:
    """Find the fastest plan that fits; exits with 3 and names the conflict when there is none."""
    from autopar.planner.branch_and_bound.process_group import cores

    check_output(plan_options.output)
    plan = make_plan(
        "search",
        plan_options,
        trials=trials,
        search_timeout_s=timeout,
        max_step_time_s=plan_options.max_step_time,
        storage=storage,
        study_name=study_name,
        workers=workers or (cores() if storage is None else 1),
        sampler=sampler,
        sampler_seed=sampler_seed,
    )
    save_and_print(plan, plan_options.output, plan_options.as_json)


@takes_plan_options(without=("max_step_time",))
def estimate(plan_options: PlanOptions) -> None:
    """Predict the plan that the pins describe, without a search; all else is as usual in practice."""
    check_output(plan_options.output)
    save_and_print(make_plan("estimate", plan_options), plan_options.output, plan_options.as_json)


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    why_not: Annotated[
        list[str] | None, typer.Option(metavar="K=V,...", help="Compare with the best plan under these pins.")
    ] = None,
    model: ModelOfPlan = None,
    as_json: Json = False,
) -> None:
    """Say why a plan was chosen, and how the best plan with other pins would compare."""
    from autopar.plan.plan import Plan
    from autopar.report.summaries import comparison, render_comparison

    plan = Plan.load(plan_file)
    if not why_not:
        refuse_beside("without --why-not", model=model)
        print_result(
            as_json,
            lambda: {"reasons": list(plan.search.reasons), "pins": list(plan.pins), "notes": list(plan.notes)},
            lambda: "\n".join(plan.search.reasons) or "the plan records no reasons",
        )
        return
    from autopar.models.resolve import model_of, sequence_of
    from autopar.planner.space.pins import replaced

    pins = split_pins(why_not)
    if not pins:
        raise UsageError(f"--why-not {why_not[0]} names no pin", fix="Write for example --why-not tp=4")
    name = model or model_of(plan, plan_file)
    other = make_plan(
        "search",
        PlanOptions(
            model=name,
            cluster=plan.cluster,
            global_batch=plan.global_batch_size,
            seq=sequence_of(plan, name),
            precision=plan.precision.name,
            optimizer=plan.optimizer,
            pin=replaced(plan.pins, pins),
            opaque=list(plan.opaque),
        ),
    )
    print_result(
        as_json,
        lambda: {"why_not": pins, **comparison(plan, other)},
        lambda: render_comparison(plan, other, names=(str(plan_file), ", ".join(pins))),
    )


LargestCluster = Annotated[
    str, typer.Option(metavar="CLUSTER", help="The largest cluster to consider: DEVICE:NODESxPER_NODE.")
]
LargestBatch = Annotated[int, typer.Option(min=1, metavar="N", help="The largest batch to consider, in samples.")]
Price = Annotated[
    list[str] | None,
    typer.Option(metavar="DEVICE=P", help="Price of one device for an hour; repeatable, for each kind of device."),
]
OrCluster = Annotated[
    list[str] | None,
    typer.Option(metavar="CLUSTER", help="A further cluster to choose from, in part or complete; repeatable."),
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
    str, typer.Option(metavar="A,B,...", help="Two or more of time, memory (left over), devices, price (with --price).")
]
Step = Annotated[int, typer.Option(min=1, max=2**26, metavar="N", help="Step between sequence lengths, in tokens.")]


@takes_plan_options(cluster=LargestCluster)
def smallest_cluster(plan_options: PlanOptions) -> None:
    """Find the fewest devices with a plan within --max-step-time."""
    from autopar.questions.sizing import smallest_cluster as smallest

    _answer(smallest, plan_options)


@takes_plan_options(cluster=LargestCluster)
def cheapest_cluster(plan_options: PlanOptions, price: Price = None, or_cluster: OrCluster = None) -> None:
    """Find the cluster on which a step costs least within --max-step-time."""
    from autopar.questions.sizing import cheapest_cluster as cheapest
    from autopar.questions.sizing import parse_prices

    prices = parse_prices(price or ())
    _answer(lambda ask: cheapest(ask, prices, or_cluster or ()), plan_options)


@takes_plan_options(without=("seq",))
def longest_sequence(plan_options: PlanOptions, step: Step = 1024) -> None:
    """Find the longest sequence with a plan, in multiples of --step tokens."""
    from autopar.models.resolve import is_factory
    from autopar.questions.sizing import longest_sequence as longest

    if is_factory(plan_options.model):
        raise UsageError(
            "The longest sequence cannot be searched for a factory, which decides the length",
            fix="Name a model as hf:TYPE or gpt:...",
        )
    _answer(lambda ask: longest(ask, step=step), plan_options)


@takes_plan_options(global_batch=LargestBatch)
def largest_batch(plan_options: PlanOptions) -> None:
    """Find the largest batch that fits without gradient accumulation, of divisors and multiples of the number of devices."""
    from autopar.questions.sizing import largest_batch as largest

    _answer(largest, plan_options)


@takes_plan_options(without=("output",))
def sweep(plan_options: PlanOptions, scale: Scale) -> None:
    """Find the fastest plan with a number of the cluster times each factor."""
    from autopar.questions.answers_as_text import render_sweep, sweep_summary
    from autopar.questions.comparisons import parse_sweep
    from autopar.questions.comparisons import sweep as swept_over

    name, factors = parse_sweep(scale)
    with progress("reading the model") as advance:
        swept = swept_over(_ask(advance, plan_options), name, factors)
    print_result(plan_options.as_json, lambda: sweep_summary(name, swept), lambda: render_sweep(name, swept))


@takes_plan_options()
def pareto(
    plan_options: PlanOptions, objectives: Objectives = "time,memory", price: Price = None, or_cluster: OrCluster = None
) -> None:
    """Find the plans that no other one beats in all objectives; -o writes the fastest of them."""
    from autopar.questions.answers_as_text import front_summary, render_front
    from autopar.questions.comparisons import front, parse_objectives
    from autopar.questions.sizing import parse_prices

    check_output(plan_options.output)
    wanted, prices = parse_objectives(objectives), parse_prices(price or ())
    if prices and "price" not in wanted:
        raise UsageError(
            f"--price does not go with --objectives {objectives}",
            fix=f"Leave it out, or ask for --objectives {objectives},price",
        )
    with progress("reading the model") as advance:
        points = front(_ask(advance, plan_options), wanted, prices, or_cluster or ())
    with saved(points[0].plan, plan_options.output):
        print_result(plan_options.as_json, lambda: front_summary(points), lambda: render_front(points))


def _answer(question: Callable[[Ask], Answer], plan_options: PlanOptions) -> None:
    """Answer a question of :mod:`autopar.questions.sizing`, print the answer and write its plan if a file is given."""
    from autopar.questions.answers_as_text import answer_summary, render_answer

    check_output(plan_options.output)
    with progress("reading the model") as advance:
        result = question(_ask(advance, plan_options))
    with saved(result.plan, plan_options.output):
        print_result(plan_options.as_json, lambda: answer_summary(result), lambda: render_answer(result))


def _ask(advance: Callable[[str, int, int], None], options: PlanOptions) -> Ask:
    """Return the options of a command as the questions of :mod:`autopar.questions` take them."""
    from autopar.planner.branch_and_bound.process_group import cores
    from autopar.questions.sizing import Ask, tracer

    request, kept = options.request, kept_dir()
    return Ask(
        **request,
        graph_at=tracer(options.model, options.precision, request["opaque"], cache_dir=kept, advance=advance),
        cache_dir=kept,
        sequence=options.seq,
        max_step_time_s=options.max_step_time,
        progress=advance,
        processes=cores(),
    )


Name = Annotated[str | None, typer.Argument(metavar="NAME|FILE", help="A shipped layout, or the TOML file of one.")]


def published(name: Name = None, space: Space = "default", as_json: Json = False) -> None:
    """List published layouts, or search a plan for the model and cluster of one and compare it with the layout."""
    from autopar.planner.branch_and_bound.process_group import cores
    from autopar.planner.space.space import load_space
    from autopar.questions import answers_as_text as text
    from autopar.questions.comparisons import load_study, run_study, study_files

    if name is None:
        studies = [load_study(shipped) for shipped in study_files()]
        print_result(as_json, lambda: text.list_summary(studies), lambda: text.render_list(studies))
        return
    study = load_study(name)
    load_space(space)  # raises before the model is traced
    with progress("reading the study") as advance:
        result = run_study(study, space=space, progress=advance, workers=cores())
    print_result(as_json, lambda: text.study_summary(result), lambda: text.render_result(result))
