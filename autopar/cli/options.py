"""What commands have in common: options and their conversion, output, progress, and environment variables (read only here)."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperCommand

from autopar.errors import LONGEST_S, UsageError
from autopar.util.files import default_cache_dir, read_text, write_text

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:factory, hf:DIR_OR_TYPE?key=value&..., or a family: gpt:, llama: with layers=..,hidden=..",
    ),
]
ClusterOption = Annotated[
    str, typer.Option(metavar="CLUSTER", help="DEVICE:NODESxPER_NODE (h100-sxm5-80gb:4x8), local or a TOML file.")
]
GlobalBatch = Annotated[int, typer.Option(min=1, metavar="N", help="Samples of one optimizer step, over all ranks.")]
Tokens = Annotated[
    int | None,
    typer.Option(min=1, max=2**26, metavar="N", help="Tokens of a sample; the length of the model if not given."),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="fp32, tf32 (products of fp32, on GPUs), bf16, fp16 (with a loss scaler) or fp64; fp8 can only be planned."
    ),
]
Optimizer = Annotated[
    str, typer.Option(help="Optimizer, for memory and time: adamw, momentum, sgd, adafactor or adamw:bytes=2.")
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="K=V",
        help="A constraint, repeatable: tp<=4, zero=1, recompute=full ('autopar pins' lists them); @FILE has one in each line.",
    ),
]
Opaque = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A module that is not traced, by its path, a pattern or a class; repeatable."),
]
Space = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Search space: quick, default, wide, exhaustive or a TOML file.")
]
MaxStepTime = Annotated[
    float | None, typer.Option(min=0, metavar="S", help="Longest step in seconds; slower plans are excluded.")
]
ModelOfPlan = Annotated[
    str | None, typer.Option(metavar="MODEL", help="The MODEL of a PLAN whose name does not say it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of every command that makes plans; each field is an option with its default."""

    model: Model
    cluster: ClusterOption
    global_batch: GlobalBatch
    seq: Tokens = None
    precision: PrecisionOption = "fp32"
    optimizer: Optimizer = "adamw"
    pin: Pin = None
    opaque: Opaque = None
    space: Space = "default"
    max_step_time: MaxStepTime = None
    output: Output = None
    as_json: Json = False

    @property
    def request(self) -> dict[str, Any]:
        """The fields of :class:`autopar.request.Request`, without the model."""
        from autopar.planner.space.pins import Pins

        pins = tuple(split_pins(self.pin or ()))
        return {
            "cluster": self.cluster,
            "global_batch_size": self.global_batch,
            "pins": pins,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "space": self.space,
            "opaque": tuple(dict.fromkeys((*(self.opaque or ()), *Pins.parse(pins).opaque))),
        }


class StrictCommand(TyperCommand):
    """A command that refuses values that are empty, a second value of an option that holds one, and numbers without bound."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the name of the command.

        Raises:
            UsageError: a value is empty, an option is given twice, or a time is NaN, infinite or too long for timers.
        """
        values, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in given:
            value = values.get(parameter.name)
            name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.metavar
            if "" in (value if isinstance(value, list | tuple) else (value,)):
                raise UsageError(
                    f"{name} is empty", fix="Give it a value" + ("" if parameter.required else ", or leave it out")
                )
            if given.count(parameter) > 1 and isinstance(value, str):
                raise UsageError(f"{name} is given twice", fix="Keep one of them")
        rest = super().parse_args(ctx, args)
        for parameter in given:
            if isinstance(value := ctx.params[parameter.name], float) and not value <= LONGEST_S:
                raise UsageError(f"{parameter.opts[-1]} is {value:g}", fix=f"Give a number up to {LONGEST_S:g}")
        return rest


Verb = Callable[..., None]


def takes_plan_options(
    *, without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None, **otherwise: Any
) -> Callable[[Verb], Verb]:
    """Return a decorator that gives a command the options of :class:`PlanOptions`; its other options follow in the help.

    The command gets a :class:`PlanOptions` as its first argument.

    Args:
        without: options that the command does not have.
        defaults: other defaults, by name; ``inspect.Parameter.empty`` for an option that must be given.
        otherwise: annotations of options with another meaning, by name.
    """
    keyword, required = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    default_of, shared, left_out = dict(defaults or {}), dict[str, inspect.Parameter](), dict[str, Any]()
    for name, option in inspect.signature(PlanOptions, eval_str=True).parameters.items():
        default = default_of.get(name, option.default)
        if name in without:
            left_out[name] = None if default is required else default
        else:
            shared[name] = option.replace(annotation=otherwise.get(name, option.annotation), default=default)

    def with_options(verb: Verb) -> Verb:
        _, *others = inspect.signature(verb, eval_str=True).parameters.values()

        @wraps(verb)
        def command(**values: Any) -> None:
            plan_options = PlanOptions(**{name: values.pop(name) for name in shared}, **left_out)
            verb(plan_options, **values)

        parameters = [*shared.values(), *(parameter.replace(kind=keyword) for parameter in others)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return with_options


def refuse_beside(what: str, **options: object) -> None:
    """Refuse options that would have no effect.

    Raises:
        UsageError: one of them is given, beside ``what``.
    """
    for name, value in options.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} has no effect {what}", fix="Leave it out")


def parse_cluster(text: str) -> Cluster:
    """Return the cluster of ``--cluster``; measurements of this machine are in :func:`cache_dir`."""
    from autopar.hardware.cluster import Cluster

    return Cluster.parse(text, cache_dir=cache_dir())


def split_pins(texts: Sequence[str]) -> list[str]:
    """Return pins from texts, each with one pin, several with commas between them, or ``@FILE`` (lines of pins, with ``#`` remarks).

    >>> split_pins(["tp=8,pp=2", "zero=1"])
    ['tp=8', 'pp=2', 'zero=1']

    Raises:
        UsageError: the file cannot be read, or a line of it is no pin.
    """
    return [pin for text in texts for part in text.split(",") for pin in _pins_in(part.strip()) if pin]


def _pins_in(text: str) -> list[str]:
    """Return the pins of one text or file."""
    if not text.startswith("@"):
        return [text]
    from autopar.planner.space.pin_syntax import parse_pin

    lines = read_text(Path(text[1:]), fix="Give --pin @FILE a text file with one pin in a line").splitlines()
    pins = [(i, pin.strip()) for i, line in enumerate(lines, 1) for pin in line.partition("#")[0].split(",")]
    for i, pin in pins:
        try:
            _ = pin and parse_pin(pin)
        except UsageError as error:
            raise error.within(f"{text[1:]}, line {i}") from error
    return [pin for _, pin in pins]


# --- output, progress, environment variables

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


@contextmanager
def json_alone() -> Iterator[None]:
    """Send all output of the body, that of child processes too, to stderr; only :func:`print_result` writes to stdout."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results, redirect_stdout(sys.stderr):
        token = _results.set(results)
        os.dup2(2, 1)
        try:
            yield
        finally:
            _results.reset(token)
            os.dup2(results.fileno(), 1)


def print_result(as_json: bool, summary: Callable[[], object], text: Callable[[], str]) -> None:
    """Print the result of a command, as JSON or as text; the other form is not computed."""
    if as_json:
        (_results.get() or sys.stdout).write(json.dumps(summary(), indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(text().rstrip("\n") + "\n")


def warn(text: str) -> None:
    """Print a remark on stderr."""
    sys.stderr.write(f"{text}\n")


def write_report(path: Path, text: str) -> None:
    """Write a result to a file, and say so on stderr.

    Raises:
        UsageError: the file cannot be written.
    """
    write_text(path, text)
    warn(f"wrote {path}")


def cache_dir() -> Path | None:
    """Return the folder with measurements of this machine, from ``AUTOPAR_CACHE``; None for the user's cache directory."""
    value = os.environ.get("AUTOPAR_CACHE", "")
    return Path(value).expanduser() if value else None


def kept_dir() -> Path:
    """Return the folder with measurements and graphs."""
    return cache_dir() or default_cache_dir()


@contextmanager
def progress(text: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr while the body runs, if stderr is a terminal.

    Yields:
        ``advance(what, done, total)``; ``total`` is 0 while it is unknown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield advance
