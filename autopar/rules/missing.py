"""Operators that the table has no rule for: found by execution, kept, and said in the notes of a plan.

The operator runs at planning time on small random operands of the ranks that it has in the graph, in float64, with its
gradient: positive ones, and ones of both signs. What is found for two ranks must hold for more as well, down to
parts of length one, and on both draws; a dim that fails there stays whole. What a file keeps is verified again before it is used: the
implementation behind a name can change. An operator for which nothing is found is repeated on every rank, by name.

The operator runs on random operands cut in two along every combination of dims of equal length
(EasyDist's ShardCombine), in float64: float32 would miss contractions. What puts itself together to
the dense output, and whose gradients do too, becomes a label of a rule line. Not found this way, and
so declared by hand: a bias added to a contraction, literals that count elements, splits that need
the rank (vocabularies), means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Op, TensorSpec, digest
from autopar.plan.mesh import P, R, S, Type
from autopar.rules.by_execution import FAILURES, call, verify_rule
from autopar.rules.grammar import Pattern, bind, parse
from autopar.rules.moving_patterns import unsplit
from autopar.rules.strategy import Strategy
from autopar.rules.table import Rule, RuleTable, default_table, torch_rules, without_refs
from autopar.util.files import write_text

MAX_COMBINATIONS = 4096
_RANKS = 2
_LABELS = "abcdefghijklmnopqrstuvwxyz"


_Dims = tuple[int | None, ...]
"""The dim along which each operand or output is split; None: R, or P of an output."""


def discover_rule(op: Op, operands: Sequence[Tensor]) -> str:
    """The rule line of an operator, for operands of these ranks.

    Args:
        op: a call of it; literals stay as they are.
        operands: small examples with every dim even; floats in float64, requiring grad where a
            gradient is wanted. Dims that differ in length are never taken for the same.

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
    labels: list[list[str]] = [[""] * x.dim() for x in operands]
    results: list[list[str]] = [[""] * y.dim() for y in dense]
    names = iter(_LABELS)
    contracted: set[str] = set()
    for dims, outputs in _splits(op, operands, dense):
        places = [(labels[i], d) for i, d in enumerate(dims) if d is not None]
        places += [(results[i], d) for i, d in enumerate(outputs) if d is not None]
        if any(row[d] for row, d in places):
            continue
        name = next(names)
        for row, d in places:
            row[d] = name
        if None in outputs:
            contracted.add(name)
    return _line(labels, results, contracted, names) + _linear(op, operands, dense)


def _splits(op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor]) -> Iterator[tuple[_Dims, _Dims]]:
    """Every split that holds, those of more operands first: they say more."""
    choices = [[None, *(d for d, n in enumerate(x.shape) if n > 1 and n % _RANKS == 0)] for x in operands]
    combinations = prod(map(len, choices))
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
            inputs = [R if d is None else S(d) for d in dims]
            if outputs is not None and _holds(op, operands, inputs, [P if d is None else S(d) for d in outputs]):
                yield dims, outputs


def _outputs(op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor], dims: _Dims) -> _Dims | None:
    """How the outputs of the parts make up the dense ones: a dim along which they join, None for a sum."""
    pieces = [
        [x] * _RANKS if d is None else list(x.detach().chunk(_RANKS, d)) for x, d in zip(operands, dims, strict=True)
    ]
    try:
        parts = [call(op, [piece[rank] for piece in pieces]) for rank in range(_RANKS)]
    except FAILURES:
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


def _holds(op: Op, operands: Sequence[Tensor], inputs: Iterable[Type], outputs: Iterable[Type]) -> bool:
    strategy = Strategy(name="found", inputs=tuple(inputs), outputs=tuple(outputs))
    return not verify_rule(op, operands, size=_RANKS, strategies=[strategy])


def _linear(op: Op, operands: Sequence[Tensor], dense: Sequence[Tensor]) -> str:
    """The clause of operands in which the operator is linear: alone, or all together."""
    groups = [(i,) for i in range(len(operands))] + ([tuple(range(len(operands)))] if len(operands) > 1 else [])
    found = []
    for group in groups:
        inputs = [P if i in group else R for i in range(len(operands))]
        summable = all(operands[i].dtype.is_floating_point for i in group) and all(
            y.dtype.is_floating_point for y in dense
        )
        if summable and _holds(op, operands, inputs, [P] * len(dense)):
            found.append("+".join(map(str, group)))
    return f"; linear {', '.join(found)}" if found else ""


def _line(labels: list[list[str]], results: list[list[str]], contracted: set[str], names: Iterator[str]) -> str:
    def text(row: list[str]) -> str:
        return " ".join(f"{n}+" if n in contracted else n or f"{next(names)}^" for n in row)

    return f"{', '.join(map(text, labels))} -> {', '.join(map(text, results))}"


VERSION = "4"
"""Of the way rules are found; with torch's it names the file in which they are kept."""

MAX_LENGTH = 64
"""Of a dim that is split into parts of length one in the check."""
MAX_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A kind of call without a declared rule: ``line`` is empty when nothing was found, ``why`` says the reason."""

    target: str
    key: str
    line: str
    why: str = field(default="", repr=False)


def complete(graph: Graph, *, cache_dir: Path | None = None, table: RuleTable | None = None) -> tuple[Found, ...]:
    """Finds rules for the operators of a graph that have none and adds them to the table.

    Args:
        graph: as traced.
        cache_dir: where to keep what is found; nothing is kept when None.
        table: default: the default table.

    Returns:
        One entry for each kind of call (operator, literals, ranks and types of operands), in order.
    """
    table = table or default_table()
    kept = _Kept(cache_dir)
    found: dict[str, Found] = {}
    for op in (*graph.prelude, *graph.ops):
        rule = table.rules.get(op.target)  # which may have been added on the way
        by_call = _ByCall() if rule is None else rule.make
        if not isinstance(by_call, _ByCall):
            continue
        operands = tuple(graph.spec(ref) for ref in op.operands)
        key = key_of(op, operands)
        if key in found:
            continue
        full = f"{key} {digest(repr(_small_shapes(operands)))}"
        one = by_call.kept.get(full) or by_call.adopted(key) or _find(op, operands, key, kept, full)
        found[key] = one
        if by_call.found.get(key) != one:
            made = _ByCall({**by_call.found, key: one}, {**by_call.kept, full: one})
            table.put(op.target, Rule(make=made, found=True))
    kept.save()
    return tuple(found.values())


def own_rules(graph: Graph, *, table: RuleTable | None = None) -> dict[str, Rule]:
    """The rules of a graph's operators that are not shipped, by target, in order: declared by a user, or found by execution."""
    known, shipped = (table or default_table()).rules, torch_rules()
    calls: dict[str, set[str]] = {}
    for op in (*graph.prelude, *graph.ops):
        calls.setdefault(op.target, set()).add(key_of(op, tuple(graph.spec(ref) for ref in op.operands)))
    own: dict[str, Rule] = {}
    for target in sorted(calls):
        rule = known.get(target)
        if rule is not None and isinstance(rule.make, _ByCall):
            found = rule.make.found
            own[target] = replace(
                rule, make=_ByCall({key: found[key] for key in sorted(found) if key in calls[target]})
            )
        elif rule is not None and rule.line and (target not in shipped or shipped[target].line != rule.line):
            own[target] = rule
    return own


def adopt(rules: Mapping[str, Rule], *, table: RuleTable | None = None) -> None:
    """Add rules that :func:`own_rules` gave in another process, without checking them again."""
    for target, rule in rules.items():
        (table or default_table()).put(target, rule)


def key_of(op: Op, operands: Sequence[TensorSpec]) -> str:
    """Equal for calls that a found rule treats alike: literals, ranks, dtypes and what has a gradient."""
    arguments = without_refs(op.args), without_refs(op.kwargs)
    ranks = [(len(s.shape), [n == 1 for n in s.shape], str(s.dtype), s.requires_grad) for s in operands]
    return f"{op.target} {digest(repr((arguments, ranks, [len(s.shape) for s in op.outputs])))}"


@dataclass(frozen=True, slots=True)
class _ByCall:
    """A rule that differs between calls: by :func:`key_of`; a call that is not known is not split.

    ``kept``: what was found for each key and the lengths that were tried: a graph has the rules of its own lengths, whichever
    graphs this process has seen before. Another process, which runs a plan, finds the same ones.
    """

    found: dict[str, Found] = field(default_factory=dict)
    kept: dict[str, Found] = field(default_factory=dict)

    def adopted(self, key: str) -> Found | None:
        """What another process has found for it."""
        return None if any(full.startswith(key) for full in self.kept) else self.found.get(key)

    def __call__(self, op: Op, operands: tuple[TensorSpec, ...]) -> Pattern:
        one = self.found.get(key_of(op, operands))
        if one is None or not one.line:
            return unsplit(op, operands)
        return bind(parse(one.line), tuple(spec.shape for spec in operands), tuple(spec.shape for spec in op.outputs))


def _find(op: Op, operands: tuple[TensorSpec, ...], key: str, kept: _Kept, full: str) -> Found:
    why = "its tensors are too large to try"
    if operands and not any(spec.shape for spec in operands):  # which a line cannot tell from no operand at all
        return Found(target=op.target, key=key, line="", why="no operand has a dim")
    for shapes in _small_shapes(operands):
        try:
            draws = _draws(op, operands, shapes)
            line = kept.lines.get(full) or _narrowed(op, draws)
            if _failures(op, draws, line):
                line = _narrowed(op, draws)
        except (RuleError, *FAILURES) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            continue
        useful = any(not token.endswith("^") for token in line.partition("->")[0].replace(",", " ").split())
        if useful:
            kept.add(full, line)
            return Found(target=op.target, key=key, line=line)
        why = "no dim can be split"
    return Found(target=op.target, key=key, line="", why=why)


def _small_shapes(operands: tuple[TensorSpec, ...]) -> list[list[tuple[int, ...]]]:
    """Shapes to try: every length another multiple of eight, then the shapes as they are where those are short."""
    lengths = sorted({n for spec in operands for n in spec.shape if n > 1})
    small = {n: 8 * (i + 1) for i, n in enumerate(lengths)} | {1: 1, 0: 0}
    tried = [[tuple(small[n] for n in spec.shape) for spec in operands]]
    if all(n <= MAX_LENGTH for n in lengths):
        tried.append([spec.shape for spec in operands])
    return [shapes for shapes in tried if sum(torch.Size(s).numel() for s in shapes) <= MAX_ELEMENTS]


def _draws(op: Op, operands: tuple[TensorSpec, ...], shapes: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
    """Examples that are positive, and of both signs; of them those that the operator takes and that tell something.

    Raises:
        RuleError: none tells anything.
        RuntimeError, IndexError, ValueError, TypeError: the operator takes none.
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
        if all(map(_tells, results)):
            draws.append(examples)
    if draws:
        return draws
    raise refusal or RuleError(
        f"{op.target} gives one number for all small inputs, or one that is not finite, so no rule can be discovered",
        fix="Write its rule with autopar.register_rule",
    )


def _example(spec: TensorSpec, shape: tuple[int, ...], seed: int, *, is_signed: bool) -> Tensor:
    """Each operand has a ``seed`` of its own: of equal ones a distance is zero, and zeros add up along any dim.

    ``is_signed``: what has no gradient is 1 and -1, as targets of losses by margins are.
    """
    generator = torch.Generator().manual_seed(seed)
    if not spec.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(spec.dtype)
    if is_signed:
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        x = x if spec.requires_grad else 2.0 * (x > 0).double() - 1.0
    else:
        x = torch.rand(shape, dtype=torch.float64, generator=generator) + 0.1
    return x.requires_grad_(spec.requires_grad)


def _tells(result: Tensor) -> bool:
    """Whether a result is finite and depends on something: parts of zeros, or of one number, put themselves together in any way."""
    if not result.dtype.is_floating_point or not result.numel():
        return True
    value = result.detach()
    same = bool((value == value.flatten()[0]).all()) if value.numel() > 1 else bool((value == 0).all())
    return bool(value.isfinite().all()) and not same


def _narrowed(op: Op, draws: Sequence[Sequence[Tensor]]) -> str:
    """The line found for two ranks without what does not hold for more."""
    line = discover_rule(op, draws[0])
    for _ in range(1 + line.count(" ")):
        failed = _failures(op, draws, line)
        if not failed:
            return line
        body, *clauses = line.split(";")
        label = failed[0].partition(" split ")[2].partition(" ")[0]
        if label:
            body = " ".join(_frozen(token, label) for token in body.replace(",", " ,").split()).replace(" ,", ",")
            line = ";".join([body, *clauses])
        else:
            line = body.strip()
    raise RuleError(
        f"The rule '{line}' that was found for {op.target} does not hold for every number of ranks",
        fix="Write its rule with autopar.register_rule",
    )


def _frozen(token: str, label: str) -> str:
    return f"{label}^" if token.rstrip("+^") == label else token


def _failures(op: Op, draws: Sequence[Sequence[Tensor]], line: str) -> list[str]:
    """Strategies of a line that do not hold, on few ranks and on as many as a dim is long: parts of length one."""
    table = RuleTable(rules={op.target: Rule(line=line)})
    bare = replace(op, outputs=())
    return [
        text
        for examples in draws
        for size in sorted({2, 4, *(n for x in examples for n in x.shape if 1 < n <= MAX_LENGTH)})
        for text in verify_rule(bare, examples, size=size, table=table)
    ]


class _Kept:
    """The file of rules found earlier on this machine."""

    def __init__(self, folder: Path | None) -> None:
        version = digest(f"{VERSION} {torch.__version__}")
        self.path = None if folder is None else folder / f"rules-{version}.json"
        self.lines: dict[str, str] = {}
        self.changed = False
        if self.path is not None and self.path.is_file():
            try:
                self.lines = {str(key): str(line) for key, line in json.loads(self.path.read_text()).items()}
            except (json.JSONDecodeError, AttributeError):
                self.lines = {}  # a file cut short: everything is found again

    def add(self, key: str, line: str) -> None:
        self.changed |= self.lines.get(key) != line
        self.lines[key] = line

    def save(self) -> None:
        """Writes what is new, whole or not at all."""
        if self.path is not None and self.changed:
            write_text(self.path, json.dumps(self.lines, indent=1, sort_keys=True) + "\n", make_folder=True)
