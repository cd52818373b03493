"""The grammar of rules: one line relates the dims of an operator's operands and outputs.

``"b... k+, n k+, n -> b... n; linear 0+2?, 1+2?"`` has the operands, an arrow and the outputs. Each tensor is a list of dims:

- ``name``: a dim; dims of one name have one size in all tensors.
- ``name+``: a contracted dim, over which the operator sums. If it is split, the outputs are partial.
- ``name^``: a dim that cannot be split; it is enough to mark one of the dims of a name.
- ``name...``: any number of dims, aligned to the right. A dim of size 1 broadcasts and is not split.
- ``1``: a dim of size 1.

A tensor whose first dim begins with ``~`` may lack leading dims and may have dims of size 1 (a mask). Clauses follow after semicolons:
``random`` means that ranks with different parts draw different numbers; ``linear`` lists the sets of operands in which the operator is
jointly linear (``0+1`` a sum, ``0, 1`` a product, ``2?`` an operand that may be absent). An operand that lacks a contracted dim and is
jointly linear with one that has it is added to the sum, and must be partial itself (the bias of a linear).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch

from autopar.errors import RuleError
from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.plan.mesh import I, P, R, S, Type
from autopar.rules.strategy import Strategy

Labels = tuple[str, ...]
"""The label of each dim of a tensor. Dims with the empty label are never split."""

_TOKEN = re.compile(r"(~?)([A-Za-z_]\w*)((?:\.\.\.)?)([+^]?)$|(1)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The labels of the dims of one call, from which :func:`enumerate_strategies` derives its strategies.

    Attributes:
        inputs, outputs: the labels of each operand and output.
        contracted: the labels over which the operator sums.
        frozen: the labels that cannot be split.
        linear: the sets of operands in which the operator is jointly linear.
        random: whether the operator draws random numbers.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    contracted: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One dim in the text of a rule.

    Attributes:
        label: its name; empty for ``1``.
        many: whether ``...`` follows, so that it stands for any number of dims.
        mark: ``+``, ``^`` or nothing.
        loose: whether it begins with ``~``.
    """

    label: str
    many: bool = False
    mark: str = ""
    loose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A parsed rule line.

    Attributes:
        text: the line.
        inputs, outputs: the dims of each operand and output.
        contracted, frozen: the labels that are marked with ``+`` and with ``^``.
        linear: the sets of operands in which the operator is jointly linear, as pairs: the operand's number, and whether it may be absent.
        random: whether the operator draws random numbers.
    """

    text: str
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    contracted: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    linear: tuple[tuple[tuple[int, bool], ...], ...] = ()
    random: bool = False


@lru_cache(maxsize=4096)
def parse(text: str) -> Line:
    """Parse a rule line.

    Raises:
        RuleError: the line is malformed, or a label of the operands is neither in the outputs nor marked.
    """
    body, *clauses = (part.strip() for part in text.split(";"))
    if body.count("->") != 1:
        raise RuleError(f"The rule '{text}' does not have one arrow", fix="Write 'operands -> outputs'")
    operand_text, output_text = body.split("->")
    inputs = tuple(_tensor(t, text) for t in operand_text.split(",")) if operand_text.strip() else ()
    outputs = tuple(_tensor(t, text) for t in output_text.split(","))
    dims_of_all = [dim for dims in (*inputs, *outputs) for dim in dims]
    contracted, frozen = (frozenset(dim.label for dim in dims_of_all if dim.mark == mark) for mark in "+^")
    output_labels = {dim.label for dims in outputs for dim in dims}
    for label in {dim.label for dim in dims_of_all} - output_labels - contracted - frozen - {""}:
        raise RuleError(
            f"The outputs of the rule '{text}' lack the dim {label}",
            fix=f"Write {label}+ if the operator sums over it, else {label}^",
        )
    if contracted & (frozen | output_labels):
        raise RuleError(
            f"A dim of the rule '{text}' is contracted (+), but also frozen (^) or in the outputs",
            fix="Leave + out, or take the dim out of the outputs",
        )
    linear, random = _clauses(clauses, len(inputs), text)
    return Line(
        text=text,
        inputs=inputs,
        outputs=outputs,
        contracted=contracted,
        frozen=frozen,
        linear=linear,
        random=random,
    )


def _tensor(text: str, line: str) -> tuple[Dim, ...]:
    """Parse the dims of one tensor of a rule ``line``."""
    dims = []
    for token in text.split():
        match = _TOKEN.match(token)
        if match is None:
            raise RuleError(
                f"'{token}' is not a dim", fix="Write a name, at most '...' behind it, and at most one of '+' and '^'"
            )
        tilde, label, dots, mark, _ = match.groups(default="")
        dims.append(Dim(label=label, many=bool(dots), mark=mark, loose=bool(tilde)))
    if sum(dim.many for dim in dims) > 1:
        raise RuleError(f"A tensor of the rule '{line}' has several '...'", fix="Write at most one")
    return tuple(dims)


def _clauses(clauses: list[str], operands: int, text: str) -> tuple[tuple[tuple[tuple[int, bool], ...], ...], bool]:
    """Parse the clauses after the dims; return ``linear`` and ``random`` of :class:`Line`."""
    linear: list[tuple[tuple[int, bool], ...]] = []
    random = False
    for clause in clauses:
        word, _, operand_lists = clause.partition(" ")
        if word == "random" and not operand_lists:
            random = True
        elif word == "linear" and re.fullmatch(r"[\d+?,\s]+", operand_lists):
            groups = [[item.strip() for item in group.split("+")] for group in operand_lists.split(",")]
            linear += [tuple((int(item.rstrip("?")), item.endswith("?")) for item in group) for group in groups]
        else:
            raise RuleError(f"Unknown text after ';' in the rule '{text}'", fix="Write 'random' or 'linear 0+1, 2'")
    if any(index >= operands for group in linear for index, _ in group):
        raise RuleError(
            f"'linear' in the rule '{text}' names an operand that is not there", fix="Name operands by number, from 0"
        )
    return tuple(linear), random


def bind(line: Line, shapes: tuple[tuple[int, ...] | None, ...], outputs: tuple[tuple[int, ...], ...]) -> Pattern:
    """Match a rule line with the shapes of one call.

    Args:
        line: a parsed rule.
        shapes: the shapes of the operands by their position in the rule, None for an absent operand. Trailing ones may be missing.
        outputs: the shapes of the outputs.

    Returns:
        The pattern, over the operands that are present.

    Raises:
        RuleError: the ranks or sizes do not fit the rule.
    """
    sizes: dict[str, int] = {}
    index_of: dict[int, int] = {}
    inputs: list[Labels] = []
    if len(shapes) > len(line.inputs) or len(outputs) != len(line.outputs):
        raise _misfit(line, shapes, outputs)
    widths: dict[str, int] = {}
    for dims, shape in (*zip(line.inputs, shapes, strict=False), *zip(line.outputs, outputs, strict=True)):
        for dim in dims:
            if dim.many and shape is not None:
                widths[dim.label] = max(widths.get(dim.label, 0), len(shape) - len(dims) + 1)
    for position, shape in enumerate(shapes):
        if shape is not None:
            index_of[position] = len(inputs)
            inputs.append(_labels(line, line.inputs[position], shape, sizes, widths))
    results = [_labels(line, dims, shape, sizes, widths) for dims, shape in zip(line.outputs, outputs, strict=True)]
    linear = []
    for group in line.linear:
        if all(index in index_of or optional for index, optional in group):
            members = tuple(index_of[index] for index, _ in group if index in index_of)
            if members:
                linear.append(members)
    return Pattern(
        inputs=tuple(inputs),
        outputs=tuple(results),
        contracted=_numbered(line.contracted, sizes),
        frozen=_numbered(line.frozen, sizes),
        linear=tuple(linear),
        random=line.random,
    )


def pattern_of(line: str, op: Op, operands: tuple[TensorSpec, ...]) -> Pattern:
    """Return the pattern of one call by a rule line. A None among the arguments stands for an absent operand.

    Raises:
        RuleError: the line is malformed, or the call does not fit it.
    """
    return bind(parse(line), _positional(op, operands), tuple(spec.shape for spec in op.outputs))


def _positional(op: Op, operands: tuple[TensorSpec, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """Return the shapes of the operands by their position in the rule; a None among the arguments is an absent operand."""
    shapes: list[tuple[int, ...] | None] = []
    remaining = iter(operands)
    for argument in (*op.args, *(value for _, value in op.kwargs)):
        if type(argument) is Ref:
            shapes.append(next(remaining).shape)
        elif type(argument) is tuple:
            shapes += [next(remaining).shape for item in argument if type(item) is Ref]
        elif argument is None:
            shapes.append(None)
    while shapes and shapes[-1] is None:
        shapes.pop()
    return tuple(shapes)


def _numbered(marked: frozenset[str], sizes: dict[str, int]) -> frozenset[str]:
    """Return the marked labels as they occur in ``sizes``, where the dims of ``name...`` are numbered."""
    return frozenset(label for label in sizes if label in marked or label.partition(".")[0] in marked)


def _labels(
    line: Line,
    dims: tuple[Dim, ...],
    shape: tuple[int, ...],
    sizes: dict[str, int],
    widths: dict[str, int],
) -> Labels:
    """Return the labels of one tensor; the dims of ``name...`` are called ``name.0``, ``name.1`` and so on, aligned to the right.

    Args:
        line: the rule, for messages.
        dims: the dims of the tensor in the rule.
        shape: its shape.
        sizes: the size of each label that occurred so far; new ones are added.
        widths: the largest number of dims that each ``name...`` stands for in any tensor of the call.
    """
    num_repeated, loose = len(shape) - len(dims) + 1, any(dim.loose for dim in dims)
    dim_labels: list[tuple[str, bool]] = []
    for dim in dims:
        if dim.many:
            width = widths[dim.label]
            dim_labels += [(f"{dim.label}.{i}", True) for i in range(width - num_repeated, width)]
        else:
            dim_labels.append((dim.label, loose))
    if loose and len(dim_labels) > len(shape):
        dim_labels = dim_labels[len(dim_labels) - len(shape) :]
    if len(dim_labels) != len(shape):
        raise _misfit(line, (shape,), ())
    labels = []
    for (name, broadcasts), size in zip(dim_labels, shape, strict=True):
        if broadcasts and size == 1:
            labels.append("")
        elif (sizes.setdefault(name, size) if name else 1) != size:
            raise _misfit(line, (shape,), ())
        else:
            labels.append(name)
    return tuple(labels)


def _misfit(line: Line, shapes: object, outputs: object) -> RuleError:
    return RuleError(
        f"The operands of shapes {shapes} -> {outputs} do not fit the rule '{line.text}'",
        fix="Correct the rule, or the call",
    )


def enumerate_strategies(
    pattern: Pattern, operands: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], size: Fraction
) -> Iterator[Strategy]:
    """Yield all strategies of a pattern on one axis; docs/adr/0001-types.md describes the types.

    Args:
        pattern: the labels of the call.
        operands, outputs: their specs. A tensor without gradient is R where a strategy has I otherwise.
        size: the number that a split dim is divided by. Only dims that it divides are split.

    Yields:
        ``split LABEL``, where operands that lack the label are R, or P if they are added to a contraction; then ``invariant``,
        ``replicate`` and ``linear OPERANDS``.
    """
    work = Fraction(size.denominator, size.numerator)
    yield from (_split(pattern, label, work) for label in _splittable(pattern, operands, outputs, size))
    if any(spec.requires_grad for spec in operands):
        yield invariant(operands, outputs)
    yield replicate(operands, outputs)
    if any(spec.dtype is torch.bool for spec in outputs):
        return
    for group in pattern.linear:
        if all(operands[index].dtype is not torch.bool for index in group):
            yield Strategy(
                name="linear " + "+".join(map(str, group)),
                inputs=tuple([P if index in group else R for index in range(len(operands))]),
                outputs=(P,) * len(outputs),
            )


def divides(length: int, size: Fraction) -> bool:
    """Return whether a dim of this length splits evenly on an axis of this size; a dim of length 1 is never split."""
    return length > 1 and length * size.denominator % size.numerator == 0


def invariant(operands: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Strategy:
    """Return the strategy under which every rank repeats the work and has complete gradients; tensors without gradient are R."""
    inputs, results = (tuple([I if spec.requires_grad else R for spec in specs]) for specs in (operands, outputs))
    return Strategy(name="invariant", inputs=inputs, outputs=results)


def replicate(operands: Sequence[object], outputs: Sequence[object]) -> Strategy:
    """Return the strategy under which every rank repeats the work and gradients are pending sums."""
    return Strategy(name="replicate", inputs=(R,) * len(operands), outputs=(R,) * len(outputs))


def _splittable(
    pattern: Pattern, operands: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], size: Fraction
) -> list[str]:
    """Return the labels whose dims all divide, in order of appearance. A label that occurs twice in one tensor is never split."""
    is_splittable: dict[str, bool] = {}
    for labels, spec in (*zip(pattern.inputs, operands, strict=True), *zip(pattern.outputs, outputs, strict=True)):
        for position, label in enumerate(labels):
            if not label:
                continue
            if not divides(spec.shape[position], size) or labels.index(label) != position:
                is_splittable[label] = False
            else:
                is_splittable.setdefault(label, label not in pattern.frozen)
    return [label for label, splittable in is_splittable.items() if splittable]


def _split(pattern: Pattern, label: str, work: Fraction) -> Strategy:
    """Return the strategy that splits the dims of one label."""
    added: set[int] = set()
    contracted = label in pattern.contracted
    if contracted:
        for group in pattern.linear:
            if any(label in pattern.inputs[index] for index in group):
                added.update(group)
    inputs: list[Type] = []
    for index, labels in enumerate(pattern.inputs):
        if label in labels:
            inputs.append(S(labels.index(label)))
        else:
            inputs.append(P if index in added else R)
    outputs = tuple(S(labels.index(label)) if label in labels else P for labels in pattern.outputs)
    if not contracted and P in outputs:
        raise RuleError(
            f"The split dim {label} does not stand in every output and is not contracted",
            fix=f"Write {label}+ if the operator sums over it, else {label}^",
        )
    return Strategy(name=f"split {label}", inputs=tuple(inputs), outputs=outputs, work=work, random=pattern.random)
