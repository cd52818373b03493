"""The exceptions of autopar, helpers that word their messages, and checks of arguments.

A message says what went wrong, what was expected, what was found, and what the user can do about it. All exceptions derive from
:class:`AutoparError`. The subclasses tell apart who has to act: the user, the planner's constraints, the job, or autopar's developers.
``exit_code`` is the exit status of the shell command. Any other exception that escapes from autopar is a defect of autopar.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from numbers import Integral, Real
from typing import ClassVar, Self, TypeVar

Kind = TypeVar("Kind", bound="AutoparError")

CHECK_FILE = "Check the path and the file"
"""The default remedy for a file that cannot be read."""
LONGEST_S = 1e9
"""The longest time limit, some thirty years: timers of operating systems overflow beyond."""
_REPORT = "This is a defect of autopar: please report it with the plan file"


class AutoparError(Exception):
    """An error that the user can correct. Its message has at most three short sentences.

    Args:
        problem: what went wrong, with a capital letter and without a full stop.
        where: the file, line, key, operator or rank; empty if the problem names it.
        expected: what should be there; empty if the problem says it.
        got: what was found instead. Without ``expected`` it is the reason, which follows the problem after a colon.
        fix: the remedy: the command to run, or the keyword or value to change.

    >>> print(AutoparError("The job has 3 ranks", where="plan.json", expected="4", got=3, fix="Start 4 ranks"))
    plan.json: The job has 3 ranks. Expected 4, got 3. Start 4 ranks.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, *, where: str = "", expected: str = "", got: object = None, fix: str = "") -> None:
        self.problem, self.where, self.expected, self.fix = problem, where, expected, fix
        self.got = "" if got is None else str(got)
        second = f"Expected {expected}" + (f", got {self.got}" if self.got else "") if expected else ""
        super().__init__(" ".join(_sentence(part) for part in (self.short, second, fix) if part))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error by its fields: an error of one rank is sent to the others, which raise it too."""
        fields = {"where": self.where, "expected": self.expected, "fix": self.fix}
        return partial(type(self), self.problem, got=self.got or None, **fields), ()

    @classmethod
    def unknown(cls, kind: str, name: str, known: Iterable[str], *, where: str = "", fix: str = "") -> Self:
        """Return the error for a name that is not among the ``known`` names of its ``kind``.

        >>> print(UsageError.unknown("key", "devise", ["device", "nodes"], where="c.toml, line 3"))
        c.toml, line 3: Unknown key 'devise'. Did you mean 'device'? Known: device, nodes.
        """
        text = closest(name, known)
        return cls(f"Unknown {kind} '{name}'", where=where, fix=f"{text}; {fix}" if fix else text)

    @classmethod
    def unreadable(cls, path: object, error: BaseException, *, fix: str = CHECK_FILE) -> Self:
        """Return the error for a file that cannot be read or has the wrong content; ``error`` is the cause.

        >>> print(UsageError.unreadable("c.toml", FileNotFoundError(2, "No such file or directory")))
        Cannot read c.toml: no such file or directory. Check the path and the file.
        """
        return cls(f"Cannot read {path}", got=reason(error), fix=fix)

    @classmethod
    def missing(cls, what: str, *, where: str = "", fix: str) -> Self:
        """Return the error for a required thing that is missing.

        >>> print(UsageError.missing("package transformers", fix="Run: pip install 'autopar[hf]'"))
        Missing package transformers. Run: pip install 'autopar[hf]'.
        """
        return cls(f"Missing {what}", where=where, fix=fix)

    @classmethod
    def mismatch(cls, what: str, *, expected: object, got: object, fix: str, where: str = "") -> Self:
        """Return the error for two values that must agree and do not.

        >>> print(UsageError.mismatch("The dtype of input_ids", expected="int64", got="float32", fix="Cast it"))
        The dtype of input_ids does not match. Expected int64, got float32. Cast it.
        """
        return cls(f"{what} does not match", where=where, expected=str(expected), got=got, fix=fix)

    @classmethod
    def unsupported(cls, what: str, *, instead: str, where: str = "") -> Self:
        """Return the error for a feature that autopar does not have; ``instead`` says what the user can do instead.

        >>> print(UsageError.unsupported("Training in fp8", instead="Make the plan with precision='bf16'"))
        Training in fp8 is not supported. Make the plan with precision='bf16'.
        """
        return cls(f"{what} is not supported", where=where, fix=instead)

    @property
    def short(self) -> str:
        """The place and the problem, without the remedy."""
        first = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{first}: {self.got}" if self.got and not self.expected else first

    def becoming(self, kind: type[Kind], *, where: str | None = None, fix: str | None = None) -> Kind:
        """Return this error as another class, optionally with another place or remedy."""
        where = self.where if where is None else where
        fix = self.fix if fix is None else fix
        return kind(self.problem, where=where, expected=self.expected, got=self.got or None, fix=fix)

    def within(self, where: str) -> Self:
        """Return this error with ``where`` put in front of its place, for callers that know the wider place."""
        return self.becoming(type(self), where=f"{where}: {self.where}" if self.where else where)


class UsageError(AutoparError):
    """An argument, a pin, or the description of a model or a cluster is malformed."""

    exit_code = 2


class TraceError(AutoparError):
    """The model cannot be traced to a graph; ``where`` is the line of the user's code."""


class RuleError(AutoparError):
    """An operator has no sharding rule, or its rule does not hold for the call."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; ``got`` names the smallest set of constraints that conflict."""

    exit_code = 3


class PlanError(AutoparError):
    """A plan is corrupt, was written by a newer autopar, or is for another model or cluster."""


class CheckpointError(PlanError):
    """A checkpoint is damaged, incomplete or in an unsupported format; an earlier one may be intact."""


class PlanFileError(PlanError):
    """A plan file that the user named cannot be read or does not contain a plan."""

    exit_code = 2


class RuntimeMismatchError(AutoparError):
    """The running job does not match the plan: its ranks, devices or settings are others."""


class RankFailedError(AutoparError):
    """Another rank of the job has failed, or an earlier step has; ``got`` names the rank, the stage and its error."""


class OutOfMemoryError(AutoparError):
    """A device or its host has too little memory for a step; ``got`` compares the memory in use with the prediction."""


class NonFiniteError(AutoparError):
    """A loss or a gradient is infinite or NaN, and the user asked for training to stop in that case."""


class VerificationError(AutoparError):
    """The results of the parallel program differ from those of one device."""


class InternalError(AutoparError):
    """A defect of autopar, which the user cannot correct.

    >>> print(InternalError("The program of rank 0 has no loss"))
    The program of rank 0 has no loss. This is a defect of autopar: please report it with the plan file.
    """

    def __init__(
        self, problem: str, *, where: str = "", expected: str = "", got: object = None, fix: str = _REPORT
    ) -> None:
        super().__init__(problem, where=where, expected=expected, got=got, fix=fix)


def closest(name: str, known: Iterable[str]) -> str:
    """Return the hint for a wrong name: up to three known names that start with it, else the closest name; then all known names.

    >>> closest("h10", ["cpu", "h100"])
    "Did you mean 'h100'? Known: cpu, h100"
    """
    names = sorted(known)
    match = [known for known in names if name and known.lower().startswith(name.lower())]
    match = match or difflib.get_close_matches(name, names, n=1, cutoff=0.5 if len(name) <= 3 else 0.6)
    hint = f"Did you mean {' or '.join(map(repr, match[:3]))}? " if match else ""
    return f"{hint}Known: {', '.join(names) or 'none'}"


def reason(error: BaseException) -> str:
    """Return in a few words why a file could not be read or written.

    >>> reason(PermissionError(13, "Permission denied")), reason(ValueError("no JSON, at all"))
    ('permission denied', 'no JSON, at all')
    """
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shown(value: object) -> str:
    """Return a value as an error shows it: on one line, and cut off where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole(what: str, value: object, *, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """Return an argument that has to be a whole number; those of numpy are converted, and truth values are none.

    Raises:
        UsageError: it is no such number, or out of range.

    >>> whole("seed", "1", least=0)
    Traceback (most recent call last):
    autopar.errors.UsageError: The seed is '1'. Give a whole number, at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        bounds = (f", at least {least:,}" if least > -(2**63) else "") + (f", at most {most:,}" if most < 2**62 else "")
        raise UsageError(f"The {what} is {shown(value)}", fix=f"Give a whole number{bounds}")
    return int(value)


def check_counts(**counts: object) -> None:
    """Check that numbers of things are whole numbers from 1.

    Raises:
        UsageError: names the first that is none.
    """
    for name, count in counts.items():
        whole(f"number {name}", count, least=1)


def check_seconds(least: float = 0.0, **times: object) -> None:
    """Check that times are finite numbers of seconds, at least ``least``.

    Raises:
        UsageError: names the first that is none.
    """
    for name, time in times.items():
        if isinstance(time, bool) or not isinstance(time, Real) or time < least or not time <= LONGEST_S:
            fix = f"Give a number of seconds from {least:g} to {LONGEST_S:g}"
            raise UsageError(f"The {name} is {shown(time)}", fix=fix)


def check_flags(**flags: object) -> None:
    """Check that arguments are truth values, as the text "no" would count as true.

    Raises:
        UsageError: names the first that is none.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UsageError(f"{name} is {shown(flag)}", fix=f"Write {name}=True or {name}=False")


def _sentence(text: str) -> str:
    text = text.rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, at most 200 characters; its class if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
