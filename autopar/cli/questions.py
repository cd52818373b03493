"""What ``autopar search`` does for ``--minimize``, ``--sweep``, ``--pareto``, ``--longest-sequence`` and ``--largest-batch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.console import cache_dir, print_json, print_text, progress
from autopar.cli.options import is_factory
from autopar.cli.traced import traced
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.graph.ir import Graph
    from autopar.plan import Plan


def answer(
    model: str,
    *,
    cluster: str,
    global_batch_size: int,
    sequence: int | None,
    precision: str,
    optimizer: str,
    pins: list[str],
    opaque: list[str],
    space: str,
    max_step_time_s: float | None,
    minimize: str | None,
    prices: Sequence[str],
    others: Sequence[str],
    sweep: str | None,
    pareto: str | None,
    sequence_step: int | None,
    largest_batch: bool,
    as_json: bool,
) -> Plan | None:
    """Ask, print, and return the plan of the answer where there is one (of a front the fastest).

    Raises:
        AutoparError: of the question or the search.
    """
    from autopar import questions
    from autopar.cli import question_report as report
    from autopar.search.crew import cores

    wanted = [minimize, sweep, pareto, sequence_step, largest_batch or None]
    if sum(value is not None for value in wanted) > 1:
        raise UsageError("one question is asked at a time", value="several",
                         remedy="give one of --minimize, --sweep, --pareto, --longest-sequence and --largest-batch")  # fmt: skip
    if minimize not in (None, "devices", "price"):
        raise UsageError("--minimize is devices or price", value=repr(minimize))
    if sequence_step is not None and (sequence is not None or is_factory(model)):
        raise UsageError("the length of the sequence is open where the longest is asked for",
                         value="a factory, which decides it" if is_factory(model) else f"--seq {sequence}")  # fmt: skip
    with progress("reading the model") as advance:
        ask = questions.Ask(
            graph_at=_tracer(model, precision, opaque),
            cluster=cluster,
            global_batch_size=global_batch_size,
            sequence=sequence,
            pins=tuple(pins),
            precision=precision,
            optimizer=optimizer,
            space=space,
            max_step_time_s=max_step_time_s,
            opaque=tuple(opaque),
            cache_dir=cache_dir() or Path.home() / ".cache" / "autopar",
            progress=advance,
            processes=cores(),
        )
        if sweep is not None:
            name, factors = questions.parse_sweep(sweep)
            swept = questions.sweep(ask, name, factors)
            text, data, plan = report.render_sweep(name, swept), report.sweep_summary(name, swept), None
        elif pareto is not None:
            from autopar.pareto import front, parse_objectives

            objectives = parse_objectives(pareto)
            points = front(ask, objectives, _prices(prices), others)
            text, data, plan = report.render_front(points), report.front_summary(points), points[0].plan
        else:
            if minimize == "price":
                found = questions.cheapest_cluster(ask, _prices(prices), others)
            elif minimize == "devices":
                found = questions.smallest_cluster(ask)
            elif sequence_step is not None:
                found = questions.longest_sequence(ask, step=sequence_step)
            else:
                found = questions.largest_batch(ask)
            text, data, plan = report.render_answer(found), report.answer_summary(found), found.plan
    if as_json:
        print_json(data)
    else:
        print_text(text)
    return plan


def _tracer(model: str, precision: str, opaque: Sequence[str]) -> Callable[[int, int | None], Graph]:
    """Traces at each length once; a graph in which samples meet once for each batch too."""

    @cache
    def at_batch(samples: int, tokens: int | None) -> Graph:
        return traced(model, sequence=tokens, precision=precision, opaque=opaque, global_batch_size=samples)

    free: dict[int | None, Graph] = {}

    def at(samples: int, tokens: int | None) -> Graph:
        if tokens not in free:
            graph = at_batch(samples, tokens)
            if graph.exact:
                return graph
            free[tokens] = graph
        return free[tokens]

    return at


def _prices(texts: Sequence[str]) -> dict[str, float]:
    prices = {}
    for text in (part for given in texts for part in given.split(",")):
        name, equals, value = text.partition("=")
        try:
            prices[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError("a price is DEVICE=NUMBER", value=repr(text), place="--price",
                             remedy="write for example h100-sxm5-80gb=2.5")  # fmt: skip
    return prices
