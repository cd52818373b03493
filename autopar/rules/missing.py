"""Finds rules by execution for operators that the table has no rule for; the notes of a plan mention them.

An operator runs at planning time on small random operands of the ranks that it has in the graph, in float64 (float32 would miss
contractions) and with its gradient. The operands are cut in two along every combination of dims of equal length, as ShardCombine of
EasyDist does. Where the outputs of the parts, and their gradients, make up those of the full operands, the dims get a label of a rule.

The rule is verified on more ranks, down to parts of length one, and on positive operands and on operands of both signs. A dim that fails
is not split. An operator without a rule is repeated on every rank. Some rules must be declared, as they are not found this way: a bias added to a contraction, literals that count elements,
splits that depend on the rank (vocabularies), means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from string import ascii_lowercase

import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Op, TensorSpec, digest
from autopar.plan.mesh import P, R, S, Type
from autopar.rules.by_execution import FAILURES, call, difference, verify_rule
from autopar.rules.grammar import Pattern, bind, parse
from autopar.rules.moving_patterns import unsplit
from autopar.rules.strategy import Strategy
from autopar.rules.table import Rule, RuleTable, default_table, torch_rules, without_refs

MAX_COMBINATIONS = 4096
"""The most combinations of dims that are tried for one operator."""
_RANKS = 2


def discover_rule(op: Op, operands: Sequence[Tensor]) -> str:
    """Return the rule line of an operator, for operands of these ranks.

    Args:
        op: a call of it; literals are kept.
        operands: small examples in which every dim is even. Floats are in float64, and require grad if a gradient is wanted. Dims that
            differ in length never get the same label.

    Returns:
        A line for :func:`autopar.rules.table.register_rule`; dims that cannot be split are marked ``^``.

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
    input_labels: list[list[str]] = [[""] * x.dim() for x in operands]
    output_labels: list[list[str]] = [[""] * y.dim() for y in dense]
    free_labels = iter(ascii_lowercase)
    contracted: set[str] = set()
    for inputs, outputs in _splits(op, operands, dense):
        rows = zip((*input_labels, *output_labels), (*inputs, *outputs), strict=True)
        marked = [(row, kind.dim) for row, kind in rows if kind.is_split]
        if any(row[d] for row, d in marked):
            continue
        label = next(free_labels)
        for row, d in marked:
            row[d] = label
        if P in outputs:
            contracted.add(label)
    return _line(input_labels, output_labels, contracted, free_labels) + _linear(op, operands, dense)


def _splits(
    op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor]
) -> Iterator[tuple[Sequence[Type], Sequence[Type]]]:
    """Yield the types of operands and outputs of every split that holds; splits of more operands come first, because they say more."""
    choices = [[R, *(S(d) for d, n in enumerate(x.shape) if n > 1 and n % _RANKS == 0)] for x in operands]
    num_combinations = prod(map(len, choices))
    if num_combinations > MAX_COMBINATIONS:
        raise RuleError(
            f"{op.target} has {num_combinations} combinations of dims, more than the {MAX_COMBINATIONS} that are tried",
            fix="Write its rule with autopar.register_rule",
        )
    for inputs in sorted(product(*choices), key=lambda kinds: kinds.count(R)):
        lengths = {x.shape[kind.dim] for x, kind in zip(operands, inputs, strict=True) if kind.is_split}
        if len(lengths) == 1:
            outputs = _output_types(op, operands, dense, inputs)
            if outputs is not None and _is_right(op, operands, inputs, outputs):
                yield inputs, outputs


def _output_types(
    op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor], inputs: Sequence[Type]
) -> list[Type] | None:
    """Return how the outputs of the parts make up those of the full operands, S or P; None if an output is neither."""
    parts = [
        x.detach().chunk(_RANKS, kind.dim) if kind.is_split else (x,) * _RANKS
        for x, kind in zip(operands, inputs, strict=True)
    ]
    types: list[Type] = []
    try:
        results = [call(op, [pieces[rank] for pieces in parts]) for rank in range(_RANKS)]
        for pieces, expected in zip(zip(*results, strict=True), dense, strict=True):
            kinds = (*map(S, range(expected.dim())), P)
            kind = next((kind for kind in kinds if not difference(pieces, kind, expected)), None)
            if kind is None:
                return None
            types.append(kind)
    except FAILURES:
        return None
    return types


def _is_right(op: Op, operands: Sequence[Tensor], inputs: Iterable[Type], outputs: Iterable[Type]) -> bool:
    """Return whether the strategy of these types gives what one device gives, on two ranks."""
    strategy = Strategy(name="found", inputs=tuple(inputs), outputs=tuple(outputs))
    return not verify_rule(op, operands, size=_RANKS, strategies=[strategy])


def _linear(op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor]) -> str:
    """Return the clause of operands in which the operator is linear: in each alone, or in all together."""
    groups = [(i,) for i in range(len(operands))] + ([tuple(range(len(operands)))] if len(operands) > 1 else [])
    linear_groups = []
    for group in groups:
        inputs = [P if i in group else R for i in range(len(operands))]
        summands = (*(operands[i] for i in group), *dense)
        if all(x.dtype.is_floating_point for x in summands) and _is_right(op, operands, inputs, [P] * len(dense)):
            linear_groups.append("+".join(map(str, group)))
    return f"; linear {', '.join(linear_groups)}" if linear_groups else ""


def _line(
    input_labels: list[list[str]], output_labels: list[list[str]], contracted: set[str], free_labels: Iterator[str]
) -> str:
    """Return the text of a rule from its labels; dims without a label get one of ``free_labels``, marked ``^``."""

    def text(row: list[str]) -> str:
        return " ".join(f"{n}+" if n in contracted else n or f"{next(free_labels)}^" for n in row)

    return f"{', '.join(map(text, input_labels))} -> {', '.join(map(text, output_labels))}"


MAX_LENGTH = 64
"""The largest length of a dim that the check splits into parts of length one."""
MAX_ELEMENTS = 1 << 16
"""The most elements of all operands of an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found for one kind of call without a declared rule.

    Attributes:
        target: the operator.
        key: the kind of call; see :func:`key_of`.
        line: the rule line; empty if there is none.
        why: the reason why there is none.
    """

    target: str
    key: str
    line: str
    why: str = field(default="", repr=False)


def complete(graph: Graph, *, table: RuleTable | None = None) -> tuple[Found, ...]:
    """Find rules for the operators of a graph that have none, and add them to the table.

    Args:
        graph: the traced graph.
        table: the table; None for the default one.

    Returns:
        One entry for each kind of call (operator, literals, ranks and types of operands), in order.
    """
    table = table or default_table()
    found: dict[str, Found] = {}
    for op in (*graph.prelude, *graph.ops):
        rule = table.rules.get(op.target)  # which may have been added on the way
        by_call = _RulesByCall() if rule is None else rule.make
        if not isinstance(by_call, _RulesByCall):
            continue
        operands = tuple(graph.spec(ref) for ref in op.operands)
        key = key_of(op, operands)
        if key in found:
            continue
        key_with_lengths = f"{key} {digest(repr(_small_shapes(operands)))}"
        entry = by_call.by_lengths.get(key_with_lengths) or _find(op, operands, key)
        found[key] = entry
        if by_call.found.get(key) != entry:
            rules = _RulesByCall({**by_call.found, key: entry}, {**by_call.by_lengths, key_with_lengths: entry})
            table.put(op.target, Rule(make=rules, found=True))
    return tuple(found.values())


def extra_rules(graph: Graph, *, table: RuleTable | None = None) -> dict[str, Rule]:
    """Return the rules that a user declared for operators of a graph, by target. Each process finds the others by :func:`complete`."""
    rules, shipped = (table or default_table()).rules, torch_rules()
    lines = {op.target: rules[op.target].line for op in (*graph.prelude, *graph.ops) if op.target in rules}
    return {
        target: rules[target]
        for target, line in sorted(lines.items())
        if line and (target not in shipped or shipped[target].line != line)
    }


def adopt(rules: Mapping[str, Rule], *, table: RuleTable | None = None) -> None:
    """Add rules that :func:`extra_rules` returned in another process, without checking them again."""
    for target, rule in rules.items():
        (table or default_table()).put(target, rule)


def key_of(op: Op, operands: Sequence[TensorSpec]) -> str:
    """Return a key that is equal for calls that share a found rule: equal literals, ranks, dtypes, dims of length one and gradients."""
    arguments = without_refs(op.args), without_refs(op.kwargs)
    operand_kinds = [(len(s.shape), [n == 1 for n in s.shape], str(s.dtype), s.requires_grad) for s in operands]
    return f"{op.target} {digest(repr((arguments, operand_kinds, [len(s.shape) for s in op.outputs])))}"


@dataclass(frozen=True, slots=True)
class _RulesByCall:
    """A rule that differs between calls of one operator; a call without an entry is not split.

    Attributes:
        found: the entry of each kind of call, for the lengths of the graph that was completed last.
        by_lengths: the entry of each kind of call and lengths. It makes the rules of a graph independent of the graphs that the process
            completed before, as another process which runs the plan has not seen them.
    """

    found: dict[str, Found] = field(default_factory=dict)
    by_lengths: dict[str, Found] = field(default_factory=dict)

    def __call__(self, op: Op, operands: tuple[TensorSpec, ...]) -> Pattern:
        entry = self.found.get(key_of(op, operands))
        if entry is None or not entry.line:
            return unsplit(op, operands)
        return bind(parse(entry.line), tuple(spec.shape for spec in operands), tuple(spec.shape for spec in op.outputs))


def _find(op: Op, operands: tuple[TensorSpec, ...], key: str) -> Found:
    """Return the entry of a kind of call, with the line that is found by execution."""
    reason = "its tensors are too large to try"
    if operands and not any(spec.shape for spec in operands):  # which a line cannot tell from no operand at all
        return Found(target=op.target, key=key, line="", why="no operand has a dim")
    for shapes in _small_shapes(operands):
        try:
            line = _verified_line(op, _draws(op, operands, shapes))
        except (RuleError, *FAILURES) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            continue
        is_useful = any(not token.endswith("^") for token in line.partition("->")[0].replace(",", " ").split())
        if is_useful:
            return Found(target=op.target, key=key, line=line)
        reason = "no dim can be split"
    return Found(target=op.target, key=key, line="", why=reason)


def _small_shapes(operands: tuple[TensorSpec, ...]) -> list[list[tuple[int, ...]]]:
    """Return the shapes to try: first every length becomes another multiple of eight; then the original shapes, if they are short."""
    lengths = sorted({n for spec in operands for n in spec.shape if n > 1})
    small_length = {n: 8 * (i + 1) for i, n in enumerate(lengths)} | {1: 1, 0: 0}
    candidates = [[tuple(small_length[n] for n in spec.shape) for spec in operands]]
    if all(n <= MAX_LENGTH for n in lengths):
        candidates.append([spec.shape for spec in operands])
    return [shapes for shapes in candidates if sum(torch.Size(s).numel() for s in shapes) <= MAX_ELEMENTS]


def _draws(op: Op, operands: tuple[TensorSpec, ...], shapes: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
    """Return an example with positive operands and one with both signs, if the operator takes it and its results are informative.

    Raises:
        RuleError: none is informative.
        RuntimeError, IndexError, ValueError, TypeError: the operator refuses both.
    """
    draws: list[list[Tensor]] = []
    refusal: Exception | None = None
    for is_signed in (False, True):
        pairs = zip(operands, shapes, strict=True)
        examples = [_example(spec, shape, seed, is_signed=is_signed) for seed, (spec, shape) in enumerate(pairs)]
        try:
            results = call(op, [x.detach().requires_grad_(x.requires_grad) for x in examples])
        except FAILURES as error:
            refusal = refusal or error
            continue
        if all(map(_is_informative, results)):
            draws.append(examples)
    if draws:
        return draws
    raise refusal or RuleError(
        f"{op.target} gives one number for all small inputs, or one that is not finite, so no rule can be discovered",
        fix="Write its rule with autopar.register_rule",
    )


def _example(spec: TensorSpec, shape: tuple[int, ...], seed: int, *, is_signed: bool) -> Tensor:
    """Return one operand; every operand has another ``seed``, as the distance of equal ones is zero, and zeros add up along any dim.

    With ``is_signed`` an operand without gradient has elements 1 and -1, as the targets of margin losses do.
    """
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype.is_complex:
        parts = torch.randn((*shape, 2), dtype=torch.float64, generator=generator)
        return torch.view_as_complex(parts).requires_grad_(spec.requires_grad)
    if not spec.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(spec.dtype)
    if is_signed:
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        x = x if spec.requires_grad else 2.0 * (x > 0).double() - 1.0
    else:
        x = torch.rand(shape, dtype=torch.float64, generator=generator) + 0.1
    return x.requires_grad_(spec.requires_grad)


def _is_informative(result: Tensor) -> bool:
    """Return whether a result is finite and depends on the operands.

    Zeros, or copies of one number, can be put together from parts in any way.
    """
    if not result.dtype.is_floating_point or not result.numel():
        return True
    value = result.detach()
    is_one_number = bool((value == value.flatten()[0]).all()) if value.numel() > 1 else bool((value == 0).all())
    return bool(value.isfinite().all()) and not is_one_number


def _verified_line(op: Op, draws: Sequence[Sequence[Tensor]]) -> str:
    """Return the line that is found for two ranks, without what fails on more ranks or other draws."""
    line = discover_rule(op, draws[0])
    for _ in range(1 + line.count(" ")):
        failed = _failures(op, draws, line)
        if not failed:
            return line
        label = failed[0].partition(" split ")[2].partition(" ")[0]
        line = re.sub(rf"\b{label}\b[+^]?", f"{label}^", line) if label else line.partition(";")[0].strip()
    raise RuleError(
        f"The rule '{line}' that was found for {op.target} does not hold for every number of ranks",
        fix="Write its rule with autopar.register_rule",
    )


def _failures(op: Op, draws: Sequence[Sequence[Tensor]], line: str) -> list[str]:
    """Return the failures of a line on two and four ranks, and on as many ranks as a dim is long, where parts have length one."""
    table = RuleTable(rules={op.target: Rule(line=line)})
    bare = replace(op, outputs=())
    return [
        text
        for examples in draws
        for size in sorted({2, 4, *(n for x in examples for n in x.shape if 1 < n <= MAX_LENGTH)})
        for text in verify_rule(bare, examples, size=size, table=table)
    ]
