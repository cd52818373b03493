from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from autopar.graph.graph import Argument, Graph, TensorSpec
from autopar.models.resolve import resolve_model
from autopar.rules.by_execution import call
from autopar.rules.grammar import Pattern, enumerate_strategies
from autopar.rules.table import RuleTable, default_table, torch_rules
from autopar.tracing.trace import trace
from tests.support.ranks_in_threads import verify_rule
from tests.support.rule_examples import FAMILIES, OUTSIDE, Example, Maker, elementwise, every, spec_of


def every_elementwise(make: Maker) -> Iterator[Example]:
    return elementwise(default_table(), make)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", [every_elementwise, *FAMILIES])
def test_every_strategy_gives_what_one_device_gives(family: Callable[[Maker], Iterator[Example]], size: int) -> None:
    examples = [e for e in family(Maker(size)) if not e.needs_other_axis]
    failures = [line for e in examples for line in verify_rule(e.op, e.operands, size=size, seed=size)]
    assert len(examples) > 7
    assert failures == []


def test_every_rule_has_an_example() -> None:
    declared = RuleTable(rules=torch_rules())  # not those that other tests have found by execution
    covered = {example.target for example in every(declared)}
    assert set(declared.rules) - covered == OUTSIDE


# Frozen for reasons that a small run does not show: a convolution whose windows do not overlap could split
# its window, and attention's kernels want the values as wide as the keys.
_HARMLESS = {
    *(("aten.conv2d.default", label) for label in ("w0", "w1")),
    *((target, "f") for target in ("aten.scaled_dot_product_attention.default", "autopar.attention")),
}


@pytest.mark.slow
def test_no_frozen_dim_could_be_split() -> None:
    """Mutation: letting any frozen label free gives a strategy that the run rejects, by chance at most once."""
    first, second = _survivors(0), _survivors(1)
    assert first & second <= _HARMLESS


def thawed(pattern: Pattern, label: str) -> Pattern:
    inside = all(label in labels for labels in pattern.outputs)
    contracted = pattern.contracted if inside else pattern.contracted | {label}
    return replace(pattern, frozen=pattern.frozen - {label}, contracted=contracted)


def _survivors(seed: int) -> set[tuple[str, str]]:
    table, size = default_table(), Fraction(2)
    survivors, mutants = set(), 0
    for example in every(table, seed):
        if example.needs_other_axis:
            continue
        dense = call(example.op, example.operands)
        outputs = tuple(spec_of(tensor) for tensor in dense)
        operands = tuple(spec_of(tensor) for tensor in example.operands)
        op = replace(example.op, outputs=outputs)
        pattern = table.pattern(op, operands)
        for label in pattern.frozen:
            found = enumerate_strategies(thawed(pattern, label), operands, outputs, size)
            mutant = next((s for s in found if s.name == f"split {label}"), None)
            if mutant is not None and not mutant.random:
                mutants += 1
                if not verify_rule(op, example.operands, size=2, strategies=[mutant]):
                    survivors.add((op.target, label))
    assert mutants > 100
    return survivors


SMALL = "hidden_size=16&num_hidden_layers=1&num_attention_heads=4&intermediate_size=32"
MODELS = {
    "gpt2": "n_embd=16&n_layer=1&n_head=4&vocab_size=32&n_positions=16",
    "llama": f"{SMALL}&vocab_size=32&num_key_value_heads=2",
    "bert": f"{SMALL}&vocab_size=32&max_position_embeddings=16",
    "vit": f"{SMALL}&image_size=8&patch_size=4&num_labels=4",
}


def _graph(kind: str) -> Graph:
    source = resolve_model(f"hf:{kind}?{MODELS[kind]}", sequence_length=None if kind == "vit" else 8, batch_size=4)
    batch = dict(source.example_inputs)
    if kind in ("llama", "bert"):
        batch["attention_mask"] = torch.ones(4, 8, dtype=torch.int64)
    return trace(source.model.train(), (), batch)


def _double(value: Argument) -> Argument:
    """Literals for float64, in which rules are checked."""
    if isinstance(value, tuple):
        return tuple(_double(item) for item in value)
    return torch.float64 if value is torch.float32 else value


def _operand(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if spec.dtype is torch.bool:
        return torch.rand(spec.shape, generator=generator) < 0.9
    if spec.dtype.is_floating_point:
        x = torch.rand(spec.shape, dtype=torch.float64, generator=generator) + 0.1
        return x.requires_grad_(spec.requires_grad)
    return torch.randint(0, 4, spec.shape, dtype=spec.dtype, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_operator_of_a_model_holds_by_execution(kind: str) -> None:
    graph = _graph(kind)
    generator = torch.Generator().manual_seed(0)
    checked: set[object] = set()
    failures: list[str] = []
    for op in (*graph.prelude, *graph.ops):
        operands = tuple(graph.spec(ref) for ref in op.operands)
        known = default_table().strategies(op, operands, axis="tp", size=Fraction(2))
        if known in checked and op.target in checked:
            continue
        checked |= {known, op.target}
        kwargs = tuple((key, _double(value)) for key, value in op.kwargs)
        wide = replace(op, args=tuple(map(_double, op.args)), kwargs=kwargs)
        failures += verify_rule(wide, [_operand(spec, generator) for spec in operands], size=2)
    assert len(checked) > 20
    assert failures == []
