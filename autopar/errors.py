"""The errors autopar raises: what went wrong, what was expected and what there is, and what to do.

Users catch :class:`AutoparError`; its kinds differ by who has to act. ``exit_code`` is what the
shell command returns. Anything else that escapes is a defect of autopar.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import ClassVar, Self, TypeVar

Kind = TypeVar("Kind", bound="AutoparError")

CHECK_FILE = "Check the path and the file"
_REPORT = "This is a defect of autopar: please report it with the plan file"


class AutoparError(Exception):
    """Something that the user can mend, in at most three short sentences.

    Args:
        problem: what went wrong, with a capital letter and without a full stop.
        where: file, line, key, operator or rank; empty when the problem names it.
        expected: what should be there; empty when the problem says it.
        got: what is there instead. Without ``expected`` it is the reason, and follows the problem after a colon.
        fix: what to do about it: the command, the keyword or the value.

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
        """By the fields: an error crosses processes, where every rank raises what one of them found."""
        fields = {"where": self.where, "expected": self.expected, "fix": self.fix}
        return partial(type(self), self.problem, got=self.got or None, **fields), ()

    @classmethod
    def unknown(cls, kind: str, name: str, known: Iterable[str], *, where: str = "", fix: str = "") -> Self:
        """A name that is none of the ``known`` ones.

        >>> print(UsageError.unknown("key", "devise", ["device", "nodes"], where="c.toml, line 3"))
        c.toml, line 3: Unknown key 'devise'. Did you mean 'device'? Known: device, nodes.
        """
        text = closest(name, known)
        return cls(f"Unknown {kind} '{name}'", where=where, fix=f"{text}; {fix}" if fix else text)

    @classmethod
    def unreadable(cls, path: object, error: BaseException, *, fix: str = CHECK_FILE) -> Self:
        """A file that cannot be read, or is not what it should be.

        >>> print(UsageError.unreadable("c.toml", FileNotFoundError(2, "No such file or directory")))
        Cannot read c.toml: no such file or directory. Check the path and the file.
        """
        return cls(f"Cannot read {path}", got=reason(error), fix=fix)

    @classmethod
    def missing(cls, what: str, *, where: str = "", fix: str) -> Self:
        """Something that has to be there.

        >>> print(UsageError.missing("package transformers", fix="Run: pip install 'autopar[hf]'"))
        Missing package transformers. Run: pip install 'autopar[hf]'.
        """
        return cls(f"Missing {what}", where=where, fix=fix)

    @classmethod
    def mismatch(cls, what: str, *, expected: object, got: object, fix: str, where: str = "") -> Self:
        """Two things that must agree.

        >>> print(UsageError.mismatch("The dtype of input_ids", expected="int64", got="float32", fix="Cast it"))
        The dtype of input_ids does not match. Expected int64, got float32. Cast it.
        """
        return cls(f"{what} does not match", where=where, expected=str(expected), got=got, fix=fix)

    @classmethod
    def unsupported(cls, what: str, *, instead: str, where: str = "") -> Self:
        """What autopar does not do, and what to do instead.

        >>> print(UsageError.unsupported("Training in fp8", instead="Make the plan with precision='bf16'"))
        Training in fp8 is not supported. Make the plan with precision='bf16'.
        """
        return cls(f"{what} is not supported", where=where, fix=instead)

    @property
    def short(self) -> str:
        """Where and what went wrong, without what to do about it."""
        first = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{first}: {self.got}" if self.got and not self.expected else first

    def becoming(self, kind: type[Kind], *, where: str | None = None, fix: str | None = None) -> Kind:
        """The same error as another kind, or with another place or remedy."""
        where = self.where if where is None else where
        fix = self.fix if fix is None else fix
        return kind(self.problem, where=where, expected=self.expected, got=self.got or None, fix=fix)

    def within(self, where: str) -> Self:
        """The same error with ``where`` put in front of its own, as it unwinds."""
        return self.becoming(type(self), where=f"{where}: {self.where}" if self.where else where)


class UsageError(AutoparError):
    """A malformed argument, pin, model or cluster description."""

    exit_code = 2


class TraceError(AutoparError):
    """The model cannot be made into a graph; ``where`` is the user's line."""


class RuleError(AutoparError):
    """An operator has no rule, or a rule does not hold."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; ``got`` names the smallest set that conflicts."""

    exit_code = 3


class PlanError(AutoparError):
    """A plan file is corrupt, newer than this autopar, or for another model or cluster."""


class CheckpointError(PlanError):
    """A checkpoint is damaged, incomplete or of a kind that is not read; an earlier one may be whole."""


class PlanFileError(PlanError):
    """A plan file that the user named cannot be read, or holds no plan."""

    exit_code = 2


class RuntimeMismatchError(AutoparError):
    """The running job is not the one that the plan was made for."""


class RankFailedError(AutoparError):
    """Another rank of the job has failed, or an earlier step of it; ``got`` names the rank, the stage and its error."""


class OutOfMemoryError(AutoparError):
    """A device, or its host, has no memory left for a step; ``got`` holds what is there against the prediction."""


class NonFiniteError(AutoparError):
    """A loss or a gradient is infinite or no number, and training was to stop there."""


class VerificationError(AutoparError):
    """The sharded program differs from the single device."""


class InternalError(AutoparError):
    """A defect of autopar, which no user can mend.

    >>> print(InternalError("The program of rank 0 has no loss"))
    The program of rank 0 has no loss. This is a defect of autopar: please report it with the plan file.
    """

    def __init__(
        self, problem: str, *, where: str = "", expected: str = "", got: object = None, fix: str = _REPORT
    ) -> None:
        super().__init__(problem, where=where, expected=expected, got=got, fix=fix)


def closest(name: str, known: Iterable[str]) -> str:
    """The closest known name if there is one, or up to three that begin so, and all of them.

    >>> closest("h10", ["cpu", "h100"])
    "Did you mean 'h100'? Known: cpu, h100"
    """
    names = sorted(known)
    match = [known for known in names if name and known.lower().startswith(name.lower())]
    match = match or difflib.get_close_matches(name, names, n=1, cutoff=0.5 if len(name) <= 3 else 0.6)
    hint = f"Did you mean {' or '.join(map(repr, match[:3]))}? " if match else ""
    return f"{hint}Known: {', '.join(names) or 'none'}"


def reason(error: BaseException) -> str:
    """Why reading or writing failed, in a few words.

    >>> reason(PermissionError(13, "Permission denied")), reason(ValueError("no JSON, at all"))
    ('permission denied', 'no JSON, at all')
    """
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _sentence(text: str) -> str:
    text = text.rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


# --- Texts of errors: the first line of another error.


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
