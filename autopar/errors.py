"""The errors autopar raises: each says the law, the value, the place and the remedy.

Users catch :class:`AutoparError`; its kinds differ by who has to act. ``exit_code`` is what the
shell command returns. Anything else that escapes is a defect of autopar.
"""

from __future__ import annotations

from typing import ClassVar


class AutoparError(Exception):
    """Something that the user can mend.

    Args:
        law: what must hold, as a sentence without a full stop.
        value: what was found instead.
        place: where (file, line, key, operator, rank); empty when the law names it.
        remedy: what to do about it; empty only when the law says it.

    >>> print(AutoparError("the world size equals the product of the mesh", value="3 of 4",
    ...                    place="plan.json", remedy="start 4 ranks"))
    plan.json: the world size equals the product of the mesh, but found 3 of 4; start 4 ranks
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, law: str, *, value: object = None, place: str = "", remedy: str = "") -> None:
        self.law, self.value, self.place, self.remedy = law, value, place, remedy
        text = f"{place}: {law}" if place else law
        if value is not None:
            text += f", but found {value}"
        if remedy:
            text += f"; {remedy}"
        super().__init__(text)

    def within(self, place: str) -> AutoparError:
        """The same error with ``place`` put in front of its own, as it unwinds."""
        inner = f"{place}: {self.place}" if self.place else place
        return type(self)(self.law, value=self.value, place=inner, remedy=self.remedy)


class UsageError(AutoparError):
    """A malformed argument, pin, model or cluster description."""

    exit_code = 2


class TraceError(AutoparError):
    """The model cannot be made into a graph; ``place`` is the user's line."""


class RuleError(AutoparError):
    """An operator has no rule, or a rule does not hold."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; ``value`` names the smallest set that conflicts."""

    exit_code = 3


class PlanError(AutoparError):
    """A plan file is corrupt, newer than this autopar, or for another model or cluster."""


class PlanFileError(PlanError):
    """A plan file that the user named cannot be read, or holds no plan."""

    exit_code = 2


class RuntimeMismatchError(AutoparError):
    """The running job is not the one that the plan was made for."""


class RankFailedError(AutoparError):
    """Another rank of the job has failed, or an earlier step of it; ``value`` names the rank, the stage and its error."""


class VerificationError(AutoparError):
    """The sharded program differs from the single device."""
