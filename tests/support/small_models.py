"""Models of one function, graphs run on one device, and the check that a traced graph computes what its model does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.graph.graph import Graph
from autopar.graph.interpreter import leaves, run
from autopar.tracing.trace import trace
from autopar.verification.reference import loss_of
from tests.support.close import assert_close


def model_of(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with these attributes (modules, parameters, buffers, whatever else), which ``forward`` gets as its first argument."""
    model = type("Model", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def calling(code: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module that gives what ``code`` makes of a tensor."""
    return model_of(lambda self, x: code(x))


def in_double(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch in float64, as the model is from now on: there the parts of a sum that nearly cancel leave more than rounding."""
    model.double()
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def evaluate(graph: Graph, batch: Mapping[str, Tensor], *given: Any) -> Tensor:
    """The loss of a batch, differentiable in the parameters; ``given``: as to :func:`step`."""
    return step(graph, batch, *given)[0]


def step(
    graph: Graph,
    batch: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None = None,
    model: nn.Module | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the new values of the buffers that a step changes, by name in the model, which has the code of opaque regions."""
    env = leaves(graph, batch, parameters, buffers or {})
    run((*graph.prelude, *graph.ops), env, model)
    names = {buffer.name: buffer.fqn for buffer in graph.buffers}
    return env[graph.loss], {names[m.buffer]: env[m.value].detach() for m in graph.mutations}


def same_as_the_model(
    model: nn.Module, batch: dict[str, Tensor], graph: Graph | None = None, *, steps: int = 1, exact: bool = False
) -> Graph:
    """Loss, gradients (where there is none, zeros) and buffers of the graph are the model's, step after step; the batch is not
    touched. Without ``graph`` it is the model's trace in float64 (``exact``: for this batch size), which is given back."""
    batch = batch if graph else in_double(model, batch)

    def given() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in batch.items()}

    graph = graph or trace(model, (), given(), exact=exact)
    parameters = dict(model.named_parameters())
    for _ in range(steps):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        found, changed = step(graph, given(), parameters, before, model)
        mine = torch.autograd.grad(found, list(parameters.values()), allow_unused=True)
        wanted = loss_of(model(**given()))
        model.zero_grad()
        wanted.backward()  # the one way that older checkpoints allow
        assert_close(found, wanted)
        theirs = [parameter.grad for parameter in parameters.values()]
        zeros = [torch.zeros_like(parameter) for parameter in parameters.values()]
        assert_close(*([z if g is None else g for z, g in zip(zeros, some, strict=True)] for some in (mine, theirs)))
        after = {name: model.get_buffer(name) for name in before}  # caches that it fills are no part of a plan
        assert_close({**before, **changed}, after)
        assert changed.keys() >= {name for name in after if not torch.equal(before[name], after[name])}
    return graph
