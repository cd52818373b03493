"""The check of a rule that a user declares, by execution, before it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.graph.graph import Argument, Op, Ref
from autopar.rules.check.by_execution import call, verify_rule
from autopar.rules.grammar import Dim, parse
from autopar.rules.table import RuleTable, full_target

SIZES = (2, 4)
_UNIT = 8
"""Every dim of a made example is another multiple of this: dims of four ranks still have two elements."""


def check_rule(target: str, line: str, example: Sequence[object] | None = None) -> None:
    """Runs every strategy of a rule; see :func:`autopar.rules.registry.register_rule`.

    Raises:
        RuleError: as there.
    """
    name = full_target(target)
    arguments = tuple(made_example(line)) if example is None else tuple(example)
    operands = _tensors(arguments)
    count = iter(range(len(operands)))
    op = Op(name="example", target=name, args=tuple(_written(a, count) for a in arguments), outputs=())
    try:
        call(op, operands)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise RuleError(
            "The operator fails on an example of its rule, on CPU in float64",
            where=name,
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fix="Give arguments that it takes as example=, or check=False to take the rule on trust",
        ) from error
    table = RuleTable(rules={})
    table.register(target, line)
    failures = [
        text
        for size in SIZES
        for zigzag in (False, True)
        for text in verify_rule(op, operands, size=size, table=table, zigzag=zigzag)
    ]
    if failures:
        raise RuleError(
            f"The rule '{line}' is wrong",
            where=name,
            got="; ".join(dict.fromkeys(failures)),
            fix="Mark a dim that cannot be split with ^, and name operands in which it is linear after ';'",
        )


def made_example(line: str) -> list[Tensor]:
    """Random operands in float64 for a rule line: equal labels have equal lengths, others differ.

    >>> [tuple(x.shape) for x in made_example("b... k+, n k+ -> b... n")]
    [(8, 16), (24, 16)]
    """
    parsed = parse(line)
    labels = dict.fromkeys(dim.label for dims in parsed.inputs for dim in dims)
    lengths = {label: _UNIT * (i + 1) for i, label in enumerate(labels)}
    generator = torch.Generator().manual_seed(0)

    def one(dims: tuple[Dim, ...]) -> Tensor:
        shape = [lengths[dim.label] for dim in dims]
        return (torch.rand(shape, dtype=torch.float64, generator=generator) + 0.1).requires_grad_()

    return [one(dims) for dims in parsed.inputs]


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for item in value for x in _tensors(item)] if isinstance(value, tuple | list) else []


def _written(value: object, count: object) -> Argument:
    if isinstance(value, Tensor):
        return Ref(f"x{next(count)}")  # type: ignore[call-overload]
    if isinstance(value, tuple | list):
        return tuple(_written(item, count) for item in value)
    return value  # type: ignore[return-value]
