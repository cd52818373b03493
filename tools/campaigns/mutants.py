"""Every rule made wrong in one place: ``python -m tools.campaigns.mutants``.

A mutant is a strategy of the table with the type of one operand or output changed: a conversion more or less than the
operator needs, or another one. The check by execution must reject it. One that it takes is right after all for a
reason that :func:`reason` can name and test; the rest is listed in :data:`RIGHT`, and anything else is a survivor.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.graph.graph import TensorSpec
from autopar.plan.mesh import I, P, R, S, Type
from autopar.rules.by_execution import FAILURES, call
from autopar.rules.strategy import Strategy
from autopar.rules.table import default_table
from tests.support.ranks_in_threads import verify_rule
from tests.support.rule_examples import Example, every

SIZE = 2


@dataclass
class Outcome:
    """What became of the mutants: ``right`` counts them by reason."""

    mutants: int = 0
    caught: int = 0
    rules: set[str] = field(default_factory=set)
    right: Counter[str] = field(default_factory=Counter)
    survivors: list[str] = field(default_factory=list)


def mutate(*, every_nth: int = 1, seed: int = 0) -> Outcome:
    """Makes the mutants of all examples of all rules and checks every ``every_nth``, where it passes on other numbers too."""
    outcome, count = Outcome(), 0
    others = [list(every(default_table(), seed + more)) for more in (1, 2, 3)]  # what passes once may do so by chance
    for place, example in enumerate(every(default_table(), seed)):
        if "other" in (*example.op.args, *(value for _, value in example.op.kwargs)):
            continue
        with torch.random.fork_rng(devices=[]):
            dense = call(example.op, example.operands)
        op = replace(example.op, outputs=tuple(map(spec_of, dense)))
        operands = tuple(map(spec_of, example.operands))
        offered = default_table().strategies(op, operands, axis="tp", size=Fraction(SIZE))
        known = {_key(s, operands, op.outputs) for s in offered}
        for strategy in offered:
            for mutant in mutants_of(strategy, operands, op.outputs):
                if _reads_outside(op.target, operands, mutant):
                    continue
                count += 1
                if mutant.random or _key(mutant, operands, op.outputs) in known or count % every_nth:
                    continue
                outcome.mutants += 1
                outcome.rules.add(op.target)
                if any(_fails(e, mutant, seed) for e in (example, *(more[place] for more in others))):
                    outcome.caught += 1
                elif why := reason(example, dense, strategy, mutant):
                    outcome.right[why] += 1
                else:
                    outcome.survivors.append(
                        f"{op.target} {strategy.name}: {strategy.inputs} -> {strategy.outputs} as {mutant.inputs} -> {mutant.outputs}"
                    )
    return outcome


def _fails(example: Example, mutant: Strategy, seed: int) -> bool:
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel does not look whether lengths agree
        return bool(verify_rule(example.op, example.operands, size=SIZE, strategies=[mutant], seed=seed))


def mutants_of(
    strategy: Strategy, operands: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> Iterator[Strategy]:
    """The strategy with one type changed, for every place and type."""
    for i, spec in enumerate(operands):
        for kind in _types(spec):
            if _plain(kind, spec) != _plain(strategy.inputs[i], spec):
                yield replace(strategy, inputs=(*strategy.inputs[:i], kind, *strategy.inputs[i + 1 :]))
    for i, spec in enumerate(outputs):
        for kind in _types(spec):
            if _plain(kind, spec) != _plain(strategy.outputs[i], spec):
                yield replace(strategy, outputs=(*strategy.outputs[:i], kind, *strategy.outputs[i + 1 :]))


def _reads_outside(target: str, operands: tuple[TensorSpec, ...], mutant: Strategy) -> bool:
    """Positions as summands: kernels do not check them all, and would read memory that is not theirs."""
    positions = any(word in target for word in ("index", "gather", "scatter", "embedding", "cross_entropy"))
    return positions and any(
        kind == P and not spec.dtype.is_floating_point for kind, spec in zip(mutant.inputs, operands, strict=True)
    )


def _types(spec: TensorSpec) -> list[Type]:
    splits = [S(d) for d, n in enumerate(spec.shape) if n > 1 and n % SIZE == 0]
    return [*([I] if spec.requires_grad else []), R, P, *splits]


def _plain(kind: Type, spec: TensorSpec) -> Type:
    """Without a gradient I is R."""
    return R if kind == I and not spec.requires_grad else kind


def _key(strategy: Strategy, operands: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> object:
    return (
        tuple(_plain(t, s) for t, s in zip(strategy.inputs, operands, strict=True)),
        tuple(_plain(t, s) for t, s in zip(strategy.outputs, outputs, strict=True)),
        strategy.target,
    )


def spec_of(x: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(x.shape), dtype=x.dtype, requires_grad=x.requires_grad)


# --- mutants that are right


def reason(example: Example, dense: tuple[Tensor, ...], strategy: Strategy, mutant: Strategy) -> str:
    """Why a mutant is right, tested on the call itself; empty when no reason is known."""
    changed = [i for i, (a, b) in enumerate(zip(strategy.inputs, mutant.inputs, strict=True)) if a != b]
    if all(not y.detach().any() for y in dense):
        return "the result is zero, which is its own sum"
    if changed and not _is_read(example, changed[0]):
        return "the operator does not read the values of this operand"
    if (
        changed
        and not any(y.requires_grad for y in dense)
        and {strategy.inputs[changed[0]], mutant.inputs[changed[0]]} == {I, R}
    ):
        return "no gradient flows through the operator, so that I and R are the same"
    if _no_gradient(example, dense):
        return "the gradient is zero everywhere, which is its own sum"
    if changed and mutant.inputs[changed[0]] == R:
        indices = example.operands[2] if example.op.target == "autopar.experts" else None
        if indices is not None and int(indices.max()) < example.operands[3].shape[0] // SIZE:
            return "all tokens go to experts of the first rank, whose part of a whole tensor is where it begins"
        return RIGHT.get(strategy.target, "")
    return ""


def _is_read(example: Example, place: int) -> bool:
    operands = list(example.operands)
    x = operands[place]
    operands[place] = (
        (x.detach() * 0 + (3 if x.dtype.is_floating_point else 0)).to(x.dtype).requires_grad_(x.requires_grad)
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = call(example.op, operands)
            torch.manual_seed(0)
            before = call(example.op, example.operands)
    except FAILURES:
        return True
    return any(not torch.equal(a, b) for a, b in zip(found, before, strict=True))


def _no_gradient(example: Example, dense: tuple[Tensor, ...]) -> bool:
    wanted = [x for x in example.operands if x.requires_grad]
    ends = [y.sum() for y in dense if y.requires_grad]
    if not wanted or not ends:
        return False
    found = torch.autograd.grad(ends, wanted, allow_unused=True, retain_graph=True)
    return all(g is None or not g.any() for g in found)


_MEAN = (
    "it divides by the count of what it gets times the ranks: equal parts of the mean of a whole tensor add up to it"
)
_ROWS = "of a whole table the first rank finds every row that there is and the others none, so that the sum is right"
RIGHT = {
    "autopar.partial_mean": _MEAN,
    "autopar.embedding_vocabulary": _ROWS,
    "autopar.embedding_bag_vocabulary": _ROWS,
}
"""By what the strategy calls: mutants that take a split operand whole and are right, by what the operator does."""


def main() -> int:
    """The command."""
    found = mutate()
    print(
        f"{found.mutants} mutants of {len(found.rules)} rules: {found.caught} caught, {sum(found.right.values())} right"
    )
    for why, count in found.right.most_common():
        print(f"  {count} right: {why}")
    for line in found.survivors:
        print(f"  SURVIVES {line}")
    return 1 if found.survivors else 0


if __name__ == "__main__":
    sys.exit(main())
