"""What ``autopar search`` does for ``--minimize``, ``--sweep``, ``--pareto``, ``--longest-sequence`` and ``--largest-batch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.console import cache_dir, print_json, print_text, progress
from autopar.cli.graph_cache import traced
from autopar.cli.options import is_factory
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.graph.graph import Graph
    from autopar.plan.plan import Plan
    from autopar.questions.sizing import Ask

SEQUENCE_STEP = 1024
"""Tokens by which the longest sequence is told, if nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The options of ``autopar search`` that ask for something else than the fastest plan."""

    minimize: str | None = None
    prices: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    sweep: str | None = None
    pareto: str | None = None
    longest_sequence: bool = False
    sequence_step: int | None = None
    largest_batch: bool = False

    @property
    def asked(self) -> tuple[str, ...]:
        """The options that ask."""
        given = {
            "--minimize": self.minimize is not None,
            "--sweep": self.sweep is not None,
            "--pareto": self.pareto is not None,
            "--longest-sequence": self.longest_sequence,
            "--largest-batch": self.largest_batch,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def check(self) -> None:
        """Refuse options that do not go together: none is passed over in silence.

        Raises:
            UsageError: names the option.
        """
        if len(self.asked) > 1:
            raise UsageError(f"{' and '.join(self.asked)} are different questions", fix="Ask one of them at a time")
        if self.minimize not in (None, "devices", "price"):
            raise UsageError.unknown("quantity to minimize", self.minimize, ("devices", "price"), where="--minimize")
        if (self.prices or self.others) and self.minimize != "price" and self.pareto is None:
            raise UsageError(
                "--price and --or-cluster do not go with "
                + (
                    f"--minimize {self.minimize}"
                    if self.minimize
                    else (self.asked or ("the search for the fastest plan",))[0]
                ),
                fix="Leave them out, or ask for --minimize price or --pareto",
            )
        if self.prices and self.pareto is not None and "price" not in self.pareto:
            raise UsageError(
                f"--price does not go with --pareto {self.pareto}",
                fix=f"Leave it out, or ask for --pareto {self.pareto},price",
            )
        if self.sequence_step is not None and not self.longest_sequence:
            raise UsageError(
                "--sequence-step does not go without --longest-sequence", fix="Leave it out, or add --longest-sequence"
            )


def answer(
    question: Question,
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
    as_json: bool,
) -> Plan | None:
    """Ask, print, and return the plan of the answer where there is one (of a front the fastest).

    Raises:
        AutoparError: of the question or the search.
    """
    from autopar.planner.branch_and_bound.process_group import cores
    from autopar.questions import sizing as questions

    if question.longest_sequence and (sequence is not None or is_factory(model)):
        raise UsageError(
            "The longest sequence cannot be searched for a factory, which decides the length"
            if is_factory(model)
            else f"--seq {sequence} does not go with --longest-sequence",
            fix="Name a model as hf:TYPE or gpt:..." if is_factory(model) else "Leave one of them out",
        )
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
        text, data, plan = _answered(question, ask)
    if as_json:
        print_json(data)
    else:
        print_text(text)
    return plan


def _answered(question: Question, ask: Ask) -> tuple[str, Any, Plan | None]:
    """The answer as text and as JSON, and its plan."""
    from autopar.questions import answers_as_text as report
    from autopar.questions import sizing as questions

    if question.sweep is not None:
        from autopar.questions.sweep import parse_sweep, sweep

        name, factors = parse_sweep(question.sweep)
        swept = sweep(ask, name, factors)
        return report.render_sweep(name, swept), report.sweep_summary(name, swept), None
    if question.pareto is not None:
        from autopar.questions.pareto import front, parse_objectives

        points = front(ask, parse_objectives(question.pareto), _prices(question.prices), question.others)
        return report.render_front(points), report.front_summary(points), points[0].plan
    if question.minimize == "price":
        found = questions.cheapest_cluster(ask, _prices(question.prices), question.others)
    elif question.minimize == "devices":
        found = questions.smallest_cluster(ask)
    elif question.longest_sequence:
        found = questions.longest_sequence(ask, step=question.sequence_step or SEQUENCE_STEP)
    else:
        found = questions.largest_batch(ask)
    return report.render_answer(found), report.answer_summary(found), found.plan


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
    prices: dict[str, float] = {}
    for text in (part for given in texts for part in given.split(",")):
        name, equals, value = text.partition("=")
        if name.strip() in prices:
            raise UsageError(f"The device in '{text}' has two prices", where="--price", fix="Leave one of them out")
        try:
            prices[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError(
                f"'{text}' is not of the form DEVICE=NUMBER",
                where="--price",
                fix="Write for example h100-sxm5-80gb=2.5",
            )
    return prices
