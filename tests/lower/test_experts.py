"""Mixtures of experts on ranks: every way to run them, in random typings, against one device."""

from __future__ import annotations

import re

import pytest
import torch

from autopar import nn as autopar_nn
from autopar.errors import UsageError
from autopar.lower.check_types import typecheck
from autopar.plan.mesh import Mesh
from tests.support.close import assert_close
from tests.support.distributed.mixtures import Subject, mixture_graph
from tests.support.lower.models import random_program, whole_tensors
from tests.support.lower.ranks import assert_as_one_device, dense

WAYS = {"autopar.experts", "autopar.experts_split", "autopar.experts_dispatch"}


def test_loss_and_gradients_are_those_of_one_device_whatever_the_way() -> None:
    graph = mixture_graph()
    whole = whole_tensors(graph)
    loss, gradients = dense(graph, whole)
    seen = set()
    for tp, seed in ((2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (4, 5), (4, 6)):
        made = random_program(graph, Mesh(tp=tp), 2, seed)
        assert min(typecheck(made), typecheck(made, Mesh(dp_shard=16, tp=tp))) > 20
        assert_as_one_device(made, whole, loss, gradients)
        seen |= {op.target for op in made.graph.ops} & WAYS
    assert seen == WAYS, "the seeds cover every way"


def test_traced_and_eager_agree_and_experts_without_tokens_have_a_gradient() -> None:
    model = Subject().build()
    graph = mixture_graph()
    batch = {"input_ids": torch.randint(0, 64, (4, 8)), "labels": torch.randint(0, 64, (4, 8))}
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight[0] -= 100 * model.embed.weight.mean(0)
    loss = model(**batch)
    loss.backward()
    values = {p.name: model.get_parameter(p.fqn).detach() for p in graph.parameters}
    found, gradients = dense(graph, {**values, **batch})
    assert_close(found, loss)
    for parameter in graph.parameters:
        assert_close(gradients[parameter.name], model.get_parameter(parameter.fqn).grad)
    experts = autopar_nn.Experts(num_experts=3, hidden=4, ffn=8)
    x = torch.randn(5, 4)
    experts(x, torch.ones(5, 1), torch.ones(5, 1, dtype=torch.int64)).sum().backward()
    assert experts.gate.grad is not None and not experts.gate.grad[[0, 2]].any() and experts.gate.grad[1].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    experts = autopar_nn.Experts(num_experts=3, hidden=4, ffn=8)
    with pytest.raises(UsageError, match="tensors given to the experts do not fit"):
        experts(torch.randn(5, 3), torch.ones(5, 1), torch.ones(5, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("activation", "says"),
    [
        ("", "Unknown activation ''"),
        ("swish", "Unknown activation 'swish'"),
        ("silu limt=7", "Unknown option of the activation silu 'limt'. Did you mean 'limit'?"),
        ("silu limit=x", "The limit of the activation is 'x'. Give a number"),
    ],
)
def test_an_activation_that_is_none_is_told(activation: str, says: str) -> None:
    experts = autopar_nn.Experts(num_experts=3, hidden=4, ffn=8, activation=activation)
    with pytest.raises(UsageError, match=re.escape(says)):
        experts(torch.randn(5, 4), torch.ones(5, 1), torch.ones(5, 1, dtype=torch.int64))
