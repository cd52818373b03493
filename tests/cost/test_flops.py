"""Predicted FLOPs are those that torch's FlopCounterMode counts, on every family of docs/evidence/models.md, exactly.

Where torch's counter has no formula the test gives it one: of fused attention on a CPU (torch 2.11 to 2.13), torch's own for a GPU;
of ``_grouped_mm``, in which Hugging Face runs experts. Of the weight's gradient of grouped convolutions it has a wrong one, which
pairs every channel with every other. What a causal mask spares fused attention, which the counter does not know, is taken back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import flop_counter as flops
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost.operators.work import operand_specs, work
from autopar.graph.graph import Graph, Op
from autopar.models.resolve import resolve_model
from autopar.rules.moving_patterns import argument
from autopar.tracing.trace import trace
from tools.campaigns.models import FAMILIES

Shape = Sequence[int]
aten = torch.ops.aten

UNREAD = {"CLIP": 2 * 2 * 2 * 16}
"""FLOPs of a forward that the loss does not read, which tracing drops: CLIP here is trained on the square of its embeddings, not on
the product of two texts with two images, 16 numbers each."""


def _fused(q: Shape, k: Shape, v: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(flops.sdpa_flop_count(q, _for_all(q, k), _for_all(q, v)))


def _fused_backward(g: Shape, q: Shape, k: Shape, v: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(flops.sdpa_backward_flop_count(g, q, _for_all(q, k), _for_all(q, v)))


def _for_all(q: Shape, shared: Shape) -> Shape:
    """Keys and values of a group count for each of its heads; torch's formula in 2.11 asserts that heads are as many."""
    return (shared[0], q[1], *shared[2:])


def _grouped(a: Shape, b: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Rows by expert times a matrix each, or (the weight's gradient) the rows of each expert times themselves."""
    return 2 * a[0] * a[1] * b[-1]


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, out_val: Any = None) -> int:
    *_, transposed, _, groups, asked = rest
    if groups == 1:
        return int(flops.flop_registry[aten.convolution_backward](grad, x, weight, *rest, out_val=out_val))
    return int(flops.conv_flop_count(x.shape, weight.shape, grad.shape, transposed=transposed)) * (asked[0] + asked[1])


_convolution_backward._get_raw = True

FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _fused,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
    aten._grouped_mm: _grouped,
    aten.convolution_backward: _convolution_backward,
}


def counted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[int, int]:
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as forward:
        output = model(**batch)
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    loss = next(part for part in parts if isinstance(part, Tensor) and part.ndim == 0)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def predicted(graph: Graph) -> tuple[int, int]:
    """Forward and backward by the cost model, without what a causal mask spares."""
    forward = backward = 0
    for op in (*graph.prelude, *graph.ops):
        done = work(op, operand_specs(op, graph.spec), "cpu")
        factor = _spared(op, graph) if done.is_attention else 1.0
        forward += round(done.flops * factor)
        backward += round(done.backward_flops * factor)
    return forward, backward


def _spared(op: Op, graph: Graph) -> float:
    rows, columns = (graph.spec(ref).shape[-2] for ref in op.operands[:2])
    return 2 * rows / (rows + 1) if argument(op, 5, "is_causal", False) and rows == columns else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in {"Mistral", "Qwen3", "Mixtral"}])
def test_flops_of_a_family_are_those_that_torch_counts(family: str) -> None:
    spec, tokens = FAMILIES[family]
    source = resolve_model(spec, sequence_length=tokens)
    model, batch = source.build(seed=1), source.make_batch(source.batch_size, seed=2)
    forward, backward = counted(model, batch)
    assert forward > 0
    assert predicted(trace(model, (), batch, repeats=True)) == (forward - UNREAD.get(family, 0), backward)
