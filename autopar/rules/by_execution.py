"""Checks rules by execution: every strategy of a call runs forward and backward on several ranks and is compared with one device.

Ranks run in this process. Operands are cut from full tensors by their types; outputs and gradients are put together by theirs:

| type | operand of a rank      | output                    | cotangent of a rank | gradient                |
|------|------------------------|---------------------------|---------------------|-------------------------|
| I    | the tensor             | equal on all ranks        | the cotangent       | equal on all ranks      |
| R    | the tensor             | equal on all ranks        | a random summand    | the sum over ranks      |
| S(d) | its slice              | the parts in rank order   | its slice           | the parts in rank order |
| P    | a random summand       | the sum over ranks        | the cotangent       | equal on all ranks      |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import RuleError, UsageError
from autopar.graph.graph import Argument, Op, Ref, TensorSpec, map_refs
from autopar.ops.kernels import resolve
from autopar.plan.mesh import Type
from autopar.rules.grammar import Dim, parse
from autopar.rules.local_calls import localize, part_of
from autopar.rules.strategy import RING, Local, Strategy, check_part, check_strategy
from autopar.rules.table import RuleTable, default_table, full_target

RTOL = 1e-9
"""Relative and absolute tolerance of comparisons in float64; sums in another order differ by far less."""
FAILURES = (RuntimeError, IndexError, ValueError, TypeError, UsageError)
"""The exceptions of operators that refuse their operands; ``NotImplementedError`` is a ``RuntimeError``."""
Together = Callable[[Callable[[int, object], None], int], None]
"""Calls a function with the number of each of so many ranks and its process group, all at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dense:
    """The run of one device: operands, outputs, cotangents and gradients (None where there is no gradient)."""

    operands: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]


def verify_rule(  # noqa: PLR0913  what a check depends on
    op: Op,
    operands: Sequence[Tensor],
    *,
    size: int,
    axis: str = "tp",
    table: RuleTable | None = None,
    strategies: Iterable[Strategy] | None = None,
    seed: int = 0,
    zigzag: bool = False,
    together: Together | None = None,
) -> list[str]:
    """Run every strategy of a call on ``size`` ranks and compares it with one device.

    Args:
        op: the call. Its ``outputs`` may be empty, as they are taken from the run.
        operands: full tensors for ``op.operands``, in float64 if they are floats. The gradients of those that require grad are checked.
        size: the number of ranks on the axis.
        axis: the name of the axis.
        table: the table of rules; None for the default one.
        strategies: strategies to check instead of those of the table.
        seed: the seed of random summands and cotangents.
        zigzag: whether to cut and join in zig-zag order, and check only strategies that are possible beside ring attention
            (:mod:`autopar.rules.strategy`). Ring attention itself is always checked in this order.
        together: runs the ranks of strategies whose operators communicate, which those of declared and of found lines never do. Without
            it ranks run one after the other.

    Returns:
        One line for each strategy that fails. Of strategies that draw random numbers only shapes are checked.

    Raises:
        RuleError: the table has no rule for the call.
    """
    generator = torch.Generator().manual_seed(seed)
    dense = _run_dense(op, operands, generator)
    op = replace(op, outputs=tuple(_spec(tensor) for tensor in dense.outputs))
    if strategies is None:
        specs = tuple(_spec(tensor) for tensor in dense.operands)
        strategies = (table or default_table()).strategies(op, specs, axis=axis, size=Fraction(size))
    failures = []
    for strategy in strategies:
        if zigzag and not _is_zigzag_safe(strategy, dense, size):
            continue
        try:
            is_zigzag = zigzag or strategy.target == RING
            problem = _check(op, dense, strategy, axis, size, generator, zigzag=is_zigzag, together=together)
        except (RuleError, *FAILURES) as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if problem:
            failures.append(f"{op.target} {strategy.name} {strategy.inputs} -> {strategy.outputs}: {problem}")
    return failures


def call(op: Op, operands: Sequence[Tensor], axis: tuple[str, object] | None = None) -> tuple[Tensor, ...]:
    """Run one operator on tensors for its operands.

    Args:
        op: the call.
        operands: a tensor for each of ``op.operands``.
        axis: the name of an axis among the arguments, and the value to pass instead of it; None changes no argument.
    """
    remaining = iter(operands)

    def value(argument: Argument) -> Any:
        filled: Any = map_refs(argument, lambda _: next(remaining))  # type: ignore[arg-type, return-value]
        if axis is not None and isinstance(filled, str) and filled == axis[0]:
            return axis[1]
        return list(filled) if isinstance(filled, tuple) else filled

    args = [value(argument) for argument in op.args]
    kwargs = {key: value(argument) for key, argument in op.kwargs}
    result = resolve(op.target)(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec.of(tensor, requires_grad=tensor.requires_grad)


def _run_dense(op: Op, operands: Sequence[Tensor], generator: torch.Generator) -> _Dense:
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in operands)
    with _same_random_numbers():
        outputs = call(op, inputs)
    cotangents = tuple(_random_like(y, generator) if y.requires_grad else None for y in outputs)
    return _Dense(
        operands=inputs, outputs=outputs, cotangents=cotangents, gradients=_gradients(inputs, outputs, cotangents)
    )


def _gradients(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input that requires one, zeros if the outputs do not depend on it, and None for other inputs."""
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return tuple(None for _ in inputs)
    gradients = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True)
    remaining = iter(gradients)
    return tuple(next(remaining) if x.requires_grad else None for x in inputs)


def _is_zigzag_safe(strategy: Strategy, dense: _Dense, size: int) -> bool:
    """Return whether a strategy is possible beside ring attention, for these shapes."""
    try:
        check_strategy(strategy, "")
        tensors, types = (*dense.operands, *dense.outputs), (*strategy.inputs, *strategy.outputs)
        for x, kind in zip(tensors, types, strict=True):
            if kind.is_split:
                check_part(_spec(x), kind, size, "", axis="")
    except RuleError:
        return False
    return True


def _check(
    op: Op,
    dense: _Dense,
    strategy: Strategy,
    axis: str,
    size: int,
    generator: torch.Generator,
    *,
    zigzag: bool,
    together: Together | None,
) -> str:
    """Return what is wrong with one strategy; empty if nothing is."""
    operands = [_parts(x, t, size, generator, zigzag) for x, t in zip(dense.operands, strategy.inputs, strict=True)]
    cotangents = [
        [None] * size if g is None else _parts(g, t.gradient, size, generator, zigzag)
        for g, t in zip(dense.cotangents, strategy.outputs, strict=True)
    ]
    local = Local(
        axis=axis,
        size=Fraction(size),
        operands=tuple(_spec(pieces[0]) for pieces in operands),
        outputs=tuple(
            part_of(_spec(y), t, Fraction(size), strategy.name, axis=axis)
            for y, t in zip(dense.outputs, strategy.outputs, strict=True)
        ),
    )
    local_call = localize(op, strategy, local)
    outputs: list[tuple[Tensor, ...]] = [()] * size
    gradients: list[tuple[Tensor | None, ...]] = [()] * size

    def rank(index: int, group: object) -> None:
        inputs = [pieces[index] for pieces in operands]
        outputs[index] = call(local_call, inputs, None if group is None else (axis, group))
        rank_cotangents = [pieces[index] for pieces in cotangents]
        gradients[index] = _gradients(inputs, outputs[index], rank_cotangents)

    if together is not None and (axis in local_call.args or axis in (value for _, value in local_call.kwargs)):
        # seeded once for all threads: threads that each seed the one generator would wait for each other forever
        with _same_random_numbers():
            together(rank, size)
    else:
        for index in range(size):
            with _same_random_numbers():
                rank(index, None)
    for i, (y, kind) in enumerate(zip(dense.outputs, strategy.outputs, strict=True)):
        parts = [result[i] for result in outputs]
        if tuple(parts[0].shape) != local.outputs[i].shape:
            return f"output {i} has shape {tuple(parts[0].shape)}, not {local.outputs[i].shape}"
        if not strategy.random and (problem := difference(parts, kind, y, zigzag)):
            return f"output {i}: {problem}"
    for i, (gradient, kind) in enumerate(zip(dense.gradients, strategy.inputs, strict=True)):
        if gradient is not None and not strategy.random:
            pieces = [result[i] for result in gradients]
            if problem := difference([p for p in pieces if p is not None], kind.gradient, gradient, zigzag):
                return f"gradient of operand {i}: {problem}"
    return ""


def _parts(x: Tensor, kind: Type, size: int, generator: torch.Generator, zigzag: bool) -> list[Tensor]:
    """Return the part of a full tensor on each rank, in zig-zag order if ``zigzag`` is set."""
    from autopar.ops.sequence import zigzag as in_zigzag  # kernels are slow to import

    full = x.detach()
    if kind.is_split:
        ordered = in_zigzag(full, kind.dim, size) if zigzag else full
        pieces = list(ordered.chunk(size, dim=kind.dim))
    elif kind.kind == "P":
        pieces = [_random_like(full, generator) for _ in range(size - 1)]
        pieces.append(full - sum(pieces))
    else:
        pieces = [full] * size
    return [piece.clone(memory_format=torch.contiguous_format).requires_grad_(x.requires_grad) for piece in pieces]


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers of the shape and dtype of ``x``."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)
    return torch.randint(-9, 10, x.shape, dtype=x.dtype, generator=generator)


def difference(parts: Sequence[Tensor], kind: Type, dense: Tensor, zigzag: bool = False) -> str:
    """Return how the parts of all ranks, joined as their type says, differ from the full tensor; empty if they do not."""
    from autopar.ops.sequence import zigzag as in_zigzag

    parts = [part.detach() for part in parts]
    if kind.is_split:
        joined = torch.cat(parts, dim=kind.dim)
        candidates = [in_zigzag(joined, kind.dim, len(parts), back=True) if zigzag else joined]
    elif kind.kind == "P" and dense.dtype is torch.bool:
        return "a truth value is no sum"
    elif kind.kind == "P":
        candidates = [torch.stack(parts).sum(dim=0).to(dense.dtype)]
    else:
        candidates = parts
    for candidate in candidates:
        if candidate.shape != dense.shape:
            return f"shape {tuple(candidate.shape)}, not {tuple(dense.shape)}"
        if candidate.dtype != dense.dtype:
            return f"dtype {candidate.dtype}, not {dense.dtype}"
        if not torch.allclose(candidate, dense.detach(), rtol=RTOL, atol=RTOL, equal_nan=True):
            wide = torch.complex128 if dense.is_complex() else torch.float64
            worst = (candidate.to(wide) - dense.detach().to(wide)).abs().max().item()
            return f"{kind} differs by {worst:.3g}"
    return ""


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Make every rank, and the run of one device, draw the same random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would query every kind of device
        yield


SIZES = (2, 4)
"""Numbers of ranks on which a declared rule is checked."""
_UNIT = 8
"""Every dim of an example is another multiple of this, so that a part on four ranks still has two elements."""


def check_rule(target: str, line: str, example: Sequence[object] | None = None) -> None:
    """Run every strategy of a rule; see :func:`autopar.rules.table.register_rule`.

    Raises:
        RuleError: in the cases of ``register_rule``.
    """
    name = full_target(target)
    arguments = tuple(made_example(line)) if example is None else tuple(example)
    operands = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    numbers = count()
    op = Op(name="example", target=name, args=tuple(_with_refs(a, numbers) for a in arguments), outputs=())
    try:
        call(op, operands)
    except FAILURES as error:
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
    """Return random operands in float64 for a rule line: equal labels have equal lengths, different labels have different ones.

    >>> [tuple(x.shape) for x in made_example("b... k+, n k+ -> b... n")]
    [(8, 16), (24, 16)]
    """
    parsed = parse(line)
    labels = dict.fromkeys(dim.label for dims in parsed.inputs for dim in dims)
    lengths = {label: _UNIT * (i + 1) for i, label in enumerate(labels)}
    generator = torch.Generator().manual_seed(0)

    def operand(dims: tuple[Dim, ...]) -> Tensor:
        shape = [lengths[dim.label] for dim in dims]
        return (torch.rand(shape, dtype=torch.float64, generator=generator) + 0.1).requires_grad_()

    return [operand(dims) for dims in parsed.inputs]


def _with_refs(value: object, numbers: Iterator[int]) -> Argument:
    """Return an argument with a numbered :class:`Ref` in place of every tensor."""
    if isinstance(value, Tensor):
        return Ref(f"x{next(numbers)}")
    if isinstance(value, tuple | list):
        return tuple(_with_refs(item, numbers) for item in value)
    return value  # type: ignore[return-value]
