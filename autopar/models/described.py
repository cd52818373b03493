"""What a MODEL of the command line, or the name that it has in a plan, says by itself; nothing is built."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import UsageError
from autopar.plan.plan import Plan


def is_factory(model: str) -> bool:
    """Whether MODEL is ``package.module:factory``, which decides its own sequence length.

    >>> is_factory("my.models:net"), is_factory("hf:gpt2")
    (True, False)
    """
    from autopar.models.specs import FAMILIES  # transformers' names are slow to import

    return model.partition(":")[0] not in ("hf", *FAMILIES)


def model_of(plan: Plan, file: Path) -> str:
    """The MODEL that a plan was made from, where its name says it.

    Raises:
        UsageError: the plan was made in Python for a model without such a name.
    """
    if ":" not in plan.model.name:
        raise UsageError(
            f"The plan's model '{plan.model.name}' is no MODEL of the command line",
            where=str(file),
            fix="Say which model with --model",
        )
    return plan.model.name


def sequence_of(plan: Plan, model: str) -> int | None:
    """The length of the sequences of a plan's model; None for a factory and for a model that does not take tokens."""
    tokens = plan.model.tokens_per_sample
    return None if is_factory(model) or tokens < 2 else tokens
