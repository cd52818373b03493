"""Batches of several sizes: what ranks and one device make of them, trained and evaluated."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.reference import loss_of
from tests.support.distributed.oddities import Routed
from tests.support.parallel import gradients, state, train_step

Batch = Mapping[str, Tensor]


def stepped(
    model: nn.Module, steps: Sequence[Batch], rests: Sequence[Batch], *, rate: float = 0.1, called: bool = False
) -> dict[str, Any]:
    """Steps of gradient descent, and then what ``eval()`` makes of ``rests``, by ranks or by one device; what is refused is its error.

    ``called``: the caller calls backward.
    """
    found = dict[str, Any](steps=[], rests=[])
    parallel = model if isinstance(model, ParallelModel) else None
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for batch in steps:
        optimizer.zero_grad()
        try:
            loss = loss_of(model(**batch)) if called else train_step(model, batch)
        except UsageError as error:
            found["steps"].append(str(error))
            continue
        if called:
            loss.backward()
        found["steps"].append((loss.detach().clone(), gradients(model)))
        optimizer.step()
    found["state"] = state(model)
    model.train(isinstance(model, Routed))  # its norm has no statistics
    for batch in rests:
        try:
            with torch.no_grad():
                output = model(**batch)
                loss = loss_of(output) if parallel is None else parallel.evaluate(batch)
            found["rests"].append((loss, output))
        except UsageError as error:
            found["rests"].append(str(error))
    assert all(torch.equal(value, found["state"][name]) for name, value in state(model).items())
    return found
