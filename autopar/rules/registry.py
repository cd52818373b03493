"""Sharding rules: for each operator and mesh axis the typed ways to run it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from autopar.graph.graph import Op, TensorSpec
from autopar.rules.apply.literals import localize
from autopar.rules.strategy import Communication, Local, Strategy, Typing
from autopar.rules.table import RuleTable, torch_rules

__all__ = [
    "Communication",
    "Local",
    "RuleTable",
    "Strategy",
    "Typing",
    "default_table",
    "has_rule",
    "localize",
    "register_rule",
    "strategies",
]


@cache
def default_table() -> RuleTable:
    """The one table that users extend by :func:`register_rule` and that is used unless another is given."""
    return RuleTable(rules=torch_rules())


def strategies(
    op: Op,
    operands: tuple[TensorSpec, ...],
    *,
    axis: str,
    size: Fraction,
    fallback: bool = False,
    table: RuleTable | None = None,
) -> tuple[Strategy, ...]:
    """All ways to run one operator on one mesh axis.

    Args:
        op: the call; names and layouts do not matter, literals do.
        operands: specs of ``op.operands``, in order, before the axis is applied. Where one has no
            gradient, every I is written R, which is the same for it.
        axis: mesh axis, or ``batch``.
        size: by what the axis divides a dim; only dims that divide evenly are split.
        fallback: an operator without a rule gives ``invariant`` and ``replicate`` only, and the
            caller records it by name, instead of an error.
        table: rules to use instead of :func:`default_table`.

    Raises:
        RuleError: no rule, or the call does not fit it.
    """
    rules = default_table() if table is None else table
    return rules.strategies(op, operands, axis=axis, size=size, fallback=fallback)


def has_rule(target: str, *, table: RuleTable | None = None) -> bool:
    """True when the table has a declared rule for an operator, by its target."""
    rule = (default_table() if table is None else table).rules.get(target)
    return rule is not None and not rule.found


def register_rule(
    target: str,
    line: str,
    *,
    example: Sequence[object] | None = None,
    check: bool = True,
    table: RuleTable | None = None,
) -> None:
    """Adds a rule for an operator in one line: ``register_rule("mylib::fused_mlp", "b s k+, f k+ -> b s f")``.

    The rule is checked by execution before it is added: every strategy on two and on four ranks, forward and
    gradient, against one device. See :mod:`autopar.rules.grammar` for the language.

    Args:
        target: ``mylib::fused_mlp`` or ``mylib::fused_mlp.overload``.
        line: the rule.
        example: arguments of one call for the check, tensors (float64 where they are floats) and others; made from
            the line when None: a tensor for each operand, every dim another length.
        check: False for an operator that cannot run here in float64: the rule is then taken on trust.
        table: default: the one that everything uses.

    Raises:
        RuleError: the line is malformed, the operator does not run on the example, or a strategy gives
            another result than one device; names the strategies.
    """
    from autopar.rules.check.register import check_rule

    if check:
        check_rule(target, line, example)
    (default_table() if table is None else table).register(target, line)
