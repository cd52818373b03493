"""A subject whose model returns no loss, as one that does: the loss is made of its output and the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autopar.tracing.batch import arguments
from autopar.tracing.trace import LossFunction

if TYPE_CHECKING:
    from autopar.verification.against_one_device import Subject


@dataclass(frozen=True, slots=True)
class WithLoss:
    """``loss_fn(output, batch)`` in place of what the model returns; modules and parameters keep their names.

    Picklable if both are: a function that can be imported.
    """

    subject: Subject
    loss_fn: LossFunction

    def build(self) -> nn.Module:
        """The model on CPU; its forward takes all of a batch."""
        model = self.subject.build()
        model.forward = partial(_loss, model.forward, self.loss_fn)
        return model

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        """Inputs by name, those of the loss among them."""
        return self.subject.make_batch(batch_size, seed=seed, padded=padded)


def _loss(forward: Callable[..., Any], loss_fn: LossFunction, **batch: Any) -> Tensor:
    positional, named = arguments(forward, batch)
    return loss_fn(forward(*(batch[k] for k in positional), **{k: batch[k] for k in named}), batch)
