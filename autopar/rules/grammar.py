"""The grammar of rules: one line says how the dims of an operator's tensors belong together.

``"b... k+, n k+, n -> b... n; linear 0+2?, 1+2?"``: operands, an arrow, outputs. Each tensor is a
list of dims:

- ``name``: dims of one name have one size, in every tensor that has it;
- ``name+``: contracted, a sum over it stands behind the operator: split, the outputs are partial;
- ``name^``: cannot be split; one of the marks suffices in one place;
- ``name...``: any number of dims, aligned to the right; a dim of size 1 broadcasts and is not split;
- ``1``: a dim of size 1.

A tensor whose first dim begins with ``~`` may lack leading dims and have dims of size 1 (a mask).
After semicolons: ``linear`` gives the sets of operands in which the operator is jointly linear
(``0+1``: a sum; ``0, 1``: a product; ``2?``: the operand may be absent); ``random``: ranks that hold
different parts draw different numbers. An operand that lacks a contracted dim but is jointly linear
with one that has it is added to the sum, and so must be partial itself (the bias of a linear).

See :func:`enumerate_strategies` for what follows from a line.
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
"""The label of each dim of a tensor; the empty label stands for a dim that has nothing to split."""

_TOKEN = re.compile(r"(~?)([A-Za-z_]\w*)((?:\.\.\.)?)([+^]?)$|(1)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The dims of one call, ready to enumerate.

    Attributes:
        inputs, outputs: labels of each operand and output.
        contracted: labels over which the operator sums.
        frozen: labels that cannot be split.
        linear: sets of operands in which the operator is jointly linear.
        random: the operator draws random numbers.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    contracted: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One token of a line; ``mark``: ``+``, ``^`` or nothing; ``loose``: it begins with ``~``."""

    label: str
    many: bool = False
    mark: str = ""
    loose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A parsed rule. ``linear``: sets of (operand, may be absent)."""

    text: str
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    contracted: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    linear: tuple[tuple[tuple[int, bool], ...], ...] = ()
    random: bool = False


@lru_cache(maxsize=4096)
def parse(text: str) -> Line:
    """Reads a rule line.

    Raises:
        RuleError: the line is malformed, or a label of the operands is neither in the outputs nor marked.
    """
    body, *clauses = (part.strip() for part in text.split(";"))
    if body.count("->") != 1:
        raise RuleError(f"The rule '{text}' does not have one arrow", fix="Write 'operands -> outputs'")
    left, right = body.split("->")
    inputs = tuple(_tensor(t, text) for t in left.split(",")) if left.strip() else ()
    outputs = tuple(_tensor(t, text) for t in right.split(","))
    every = [dim for dims in (*inputs, *outputs) for dim in dims]
    contracted, frozen = (frozenset(dim.label for dim in every if dim.mark == mark) for mark in "+^")
    known = {dim.label for dims in outputs for dim in dims}
    for label in {dim.label for dim in every} - known - contracted - frozen - {""}:
        raise RuleError(
            f"The outputs of the rule '{text}' lack the dim {label}",
            fix=f"Write {label}+ if the operator sums over it, else {label}^",
        )
    if contracted & (frozen | known):
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
    dims = []
    for token in text.split():
        match = _TOKEN.match(token)
        if match is None:
            raise RuleError(
                f"'{token}' is not a dim", fix="Write a name, at most '...' behind it, and at most one of '+' and '^'"
            )
        tilde, label, many, mark, _ = match.groups(default="")
        dims.append(Dim(label=label, many=bool(many), mark=mark, loose=bool(tilde)))
    if sum(dim.many for dim in dims) > 1:
        raise RuleError(f"A tensor of the rule '{line}' has several '...'", fix="Write at most one")
    return tuple(dims)


def _clauses(clauses: list[str], operands: int, text: str) -> tuple[tuple[tuple[tuple[int, bool], ...], ...], bool]:
    linear: list[tuple[tuple[int, bool], ...]] = []
    random = False
    for clause in clauses:
        word, _, rest = clause.partition(" ")
        if word == "random" and not rest:
            random = True
        elif word == "linear" and re.fullmatch(r"[\d+?,\s]+", rest):
            groups = [[item.strip() for item in group.split("+")] for group in rest.split(",")]
            linear += [tuple((int(item.rstrip("?")), item.endswith("?")) for item in group) for group in groups]
        else:
            raise RuleError(f"Unknown text after ';' in the rule '{text}'", fix="Write 'random' or 'linear 0+1, 2'")
    if any(index >= operands for group in linear for index, _ in group):
        raise RuleError(
            f"'linear' in the rule '{text}' names an operand that is not there", fix="Name operands by number, from 0"
        )
    return tuple(linear), random


def bind(line: Line, shapes: tuple[tuple[int, ...] | None, ...], outputs: tuple[tuple[int, ...], ...]) -> Pattern:
    """The labels of one call.

    Args:
        line: a parsed rule.
        shapes: of the operands by position in the rule; None for an absent one. Trailing ones may be missing.
        outputs: their shapes.

    Returns:
        A pattern over the operands that are present.

    Raises:
        RuleError: the ranks or sizes do not fit the rule.
    """
    sizes: dict[str, int] = {}
    present: dict[int, int] = {}
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
            present[position] = len(inputs)
            inputs.append(_labels(line, line.inputs[position], shape, sizes, widths))
    results = [_labels(line, dims, shape, sizes, widths) for dims, shape in zip(line.outputs, outputs, strict=True)]
    linear = []
    for group in line.linear:
        if all(index in present or optional for index, optional in group):
            members = tuple(present[index] for index, _ in group if index in present)
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
    """The labels of one call by a rule line; a None among the arguments is an absent operand.

    Raises:
        RuleError: the line is malformed, or the call does not fit it.
    """
    return bind(parse(line), _positional(op, operands), tuple(spec.shape for spec in op.outputs))


def _positional(op: Op, operands: tuple[TensorSpec, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """Shapes of the operands by position in the rule: a None among the arguments is an absent operand."""
    shapes: list[tuple[int, ...] | None] = []
    rest = iter(operands)
    for item in (*op.args, *(value for _, value in op.kwargs)):
        if type(item) is Ref:
            shapes.append(next(rest).shape)
        elif type(item) is tuple:
            shapes += [next(rest).shape for entry in item if type(entry) is Ref]
        elif item is None:
            shapes.append(None)
    while shapes and shapes[-1] is None:
        shapes.pop()
    return tuple(shapes)


def _numbered(marked: frozenset[str], sizes: dict[str, int]) -> frozenset[str]:
    """Marked labels as they stand in ``sizes``, those of ``name...`` numbered."""
    return frozenset(label for label in sizes if label in marked or label.partition(".")[0] in marked)


def _labels(
    line: Line,
    dims: tuple[Dim, ...],
    shape: tuple[int, ...],
    sizes: dict[str, int],
    widths: dict[str, int],
) -> Labels:
    """Labels of one tensor; the dims of ``name...`` are ``name.0``, ``name.1``, aligned to the right."""
    count, loose = len(shape) - len(dims) + 1, any(dim.loose for dim in dims)
    names: list[tuple[str, bool]] = []
    for dim in dims:
        if dim.many:
            width = widths[dim.label]
            names += [(f"{dim.label}.{i}", True) for i in range(width - count, width)]
        else:
            names.append((dim.label, loose))
    if loose and len(names) > len(shape):
        names = names[len(names) - len(shape) :]
    if len(names) != len(shape):
        raise _misfit(line, (shape,), ())
    labels = []
    for (name, broadcasts), size in zip(names, shape, strict=True):
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
    """All one-axis strategies of a pattern: splits, invariant, replicate, linear; see layouts in docs/adr.

    Args:
        pattern: labels of the call.
        operands, outputs: their specs: a tensor without gradient is R wherever a rule says I.
        size: by what a split dim is divided; only dims that divide are split.

    Yields:
        ``split LABEL`` (operands that lack the label R, or P where they are added to a contraction),
        ``invariant``, ``replicate``, ``linear OPERANDS``.
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
    """Whether a dim of this length splits evenly."""
    return length > 1 and length * size.denominator % size.numerator == 0


def invariant(operands: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Strategy:
    """The strategy under which every rank repeats the work and has the same gradients; what has no gradient is R."""
    inputs, results = (tuple([I if spec.requires_grad else R for spec in specs]) for specs in (operands, outputs))
    return Strategy(name="invariant", inputs=inputs, outputs=results)


def replicate(operands: Sequence[object], outputs: Sequence[object]) -> Strategy:
    """The strategy under which every rank repeats the work, and gradients are pending sums."""
    return Strategy(name="replicate", inputs=(R,) * len(operands), outputs=(R,) * len(outputs))


def _splittable(
    pattern: Pattern, operands: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], size: Fraction
) -> list[str]:
    """Labels whose every dim divides, in order of appearance; twice in one tensor is never split."""
    good: dict[str, bool] = {}
    for labels, spec in (*zip(pattern.inputs, operands, strict=True), *zip(pattern.outputs, outputs, strict=True)):
        for position, label in enumerate(labels):
            if not label:
                continue
            if not divides(spec.shape[position], size) or labels.index(label) != position:
                good[label] = False
            else:
                good.setdefault(label, label not in pattern.frozen)
    return [label for label, ok in good.items() if ok]


def _split(pattern: Pattern, label: str, work: Fraction) -> Strategy:
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
