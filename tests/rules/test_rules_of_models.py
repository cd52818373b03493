"""Every operator of real training graphs has a rule, and the rule holds at the shapes that stand there."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from autopar.graph.graph import Argument, Graph, Op, TensorSpec
from autopar.models.resolve import resolve_model
from autopar.rules.by_execution import verify_rule
from autopar.rules.table import default_table
from autopar.tracing.trace import trace

pytest.importorskip("transformers")

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
        wide: Op = replace(
            op,
            args=tuple(_double(arg) for arg in op.args),
            kwargs=tuple((key, _double(value)) for key, value in op.kwargs),
        )
        failures += verify_rule(wide, [_operand(spec, generator) for spec in operands], size=2)
    assert len(checked) > 20
    assert failures == []
