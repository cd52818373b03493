"""A rule found by execution, for an operator that the table does not know.

The operator runs on random operands cut in two along every combination of dims of equal length
(EasyDist's ShardCombine), in float64: float32 would miss contractions. What puts itself together to
the dense output, and whose gradients do too, becomes a label of a rule line. Not found this way, and
so declared by hand: a bias added to a contraction, literals that count elements, splits that need
the rank (vocabularies), means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.graph.graph import Op
from autopar.plan.mesh import P, R, S, Type
from autopar.rules.check.by_execution import call, verify_rule
from autopar.rules.strategy import Strategy

MAX_COMBINATIONS = 4096
_RANKS = 2
_LABELS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class _Split:
    """A split that holds: the dim of each operand and output (None: R, or P of an output)."""

    operands: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @property
    def contracted(self) -> bool:
        return None in self.outputs


def discover_rule(op: Op, operands: Sequence[Tensor], *, seed: int = 0) -> str:
    """The rule line of an operator, for operands of these ranks.

    Args:
        op: a call of it; literals stay as they are.
        operands: small examples with every dim even; floats in float64, requiring grad where a
            gradient is wanted. Dims that differ in length are never taken for the same.
        seed: of the random numbers of the check.

    Returns:
        A line for :func:`autopar.rules.registry.register_rule`; dims that cannot be split are marked ``^``.

    Raises:
        RuleError: the operator draws random numbers, or there are too many combinations to try.
    """
    dense = call(op, operands)
    if any(not torch.equal(a, b) for a, b in zip(dense, call(op, operands), strict=True)):
        raise RuleError(
            f"{op.target} gives different results when it runs twice, so no rule can be discovered",
            fix='Write its rule with autopar.register_rule, and "random" after a semicolon if it draws random numbers',
        )
    op = replace(op, outputs=())
    labels: list[list[str]] = [[""] * x.dim() for x in operands]
    results: list[list[str]] = [[""] * y.dim() for y in dense]
    names = iter(_LABELS)
    contracted: set[str] = set()
    for split in _splits(op, operands, dense, seed):
        places = [(labels[i], d) for i, d in enumerate(split.operands) if d is not None]
        places += [(results[i], d) for i, d in enumerate(split.outputs) if d is not None]
        if any(row[d] for row, d in places):
            continue
        name = next(names)
        for row, d in places:
            row[d] = name
        if split.contracted:
            contracted.add(name)
    return _line(labels, results, contracted, names) + _linear(op, operands, dense, seed)


def _splits(op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor], seed: int) -> Iterator[_Split]:
    """Every split that holds, those of more operands first: they say more."""
    choices = [[None, *(d for d, n in enumerate(x.shape) if n > 1 and n % _RANKS == 0)] for x in operands]
    combinations = 1
    for choice in choices:
        combinations *= len(choice)
    if combinations > MAX_COMBINATIONS:
        raise RuleError(
            f"{op.target} has {combinations} combinations of dims, more than the {MAX_COMBINATIONS} that are tried",
            fix="Write its rule with autopar.register_rule",
        )
    tried = sorted(product(*choices), key=lambda dims: sum(d is None for d in dims))
    for dims in tried:
        lengths = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
        if len(lengths) == 1:
            outputs = _outputs(op, operands, dense, dims)
            if outputs is not None and _holds(op, operands, dims, outputs, seed):
                yield _Split(dims, outputs)


def _outputs(
    op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor], dims: Sequence[int | None]
) -> tuple[int | None, ...] | None:
    """How the outputs of the parts make up the dense ones: a dim along which they join, None for a sum."""
    pieces = [
        [x] * _RANKS if d is None else list(x.detach().chunk(_RANKS, d)) for x, d in zip(operands, dims, strict=True)
    ]
    try:
        parts = [call(op, [piece[rank] for piece in pieces]) for rank in range(_RANKS)]
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    found: list[int | None] = []
    for i, whole in enumerate(dense):
        mine = [part[i].detach() for part in parts]
        joined = (
            d
            for d in range(whole.dim())
            if all(m.dim() == whole.dim() and m.shape[d] * _RANKS == whole.shape[d] for m in mine)
        )
        place = next((d for d in joined if _equal(torch.cat(mine, d), whole)), None)
        if place is None and (whole.dtype is torch.bool or not _equal(torch.stack(mine).sum(0), whole)):
            return None
        found.append(place)
    return tuple(found)


def _equal(a: Tensor, b: Tensor) -> bool:
    wide = torch.complex128 if b.is_complex() else torch.float64
    return a.shape == b.shape and torch.allclose(a.to(wide), b.detach().to(wide), rtol=1e-9, atol=1e-9)


def _holds(
    op: Op, operands: Sequence[Tensor], dims: Sequence[int | None], outputs: Sequence[int | None], seed: int
) -> bool:
    strategy = Strategy(
        name="found",
        inputs=tuple(R if d is None else S(d) for d in dims),
        outputs=tuple(P if d is None else S(d) for d in outputs),
        work=Fraction(1, _RANKS),
    )
    return not verify_rule(op, operands, size=_RANKS, strategies=[strategy], seed=seed)


def _linear(op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor], seed: int) -> str:
    """The clause of operands in which the operator is linear: alone, or all together."""
    groups = [(i,) for i in range(len(operands))] + ([tuple(range(len(operands)))] if len(operands) > 1 else [])
    found = []
    for group in groups:
        inputs: tuple[Type, ...] = tuple(P if i in group else R for i in range(len(operands)))
        strategy = Strategy(name="found", inputs=inputs, outputs=(P,) * len(dense))
        summable = all(operands[i].dtype.is_floating_point for i in group) and all(
            y.dtype.is_floating_point for y in dense
        )
        if summable and not verify_rule(op, operands, size=_RANKS, strategies=[strategy], seed=seed):
            found.append("+".join(map(str, group)))
    return f"; linear {', '.join(found)}" if found else ""


def _line(labels: list[list[str]], results: list[list[str]], contracted: set[str], names: Iterator[str]) -> str:
    def text(row: list[str]) -> str:
        return " ".join(f"{n}+" if n in contracted else n or f"{next(names)}^" for n in row)

    return f"{', '.join(map(text, labels))} -> {', '.join(map(text, results))}"
