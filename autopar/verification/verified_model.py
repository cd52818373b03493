"""A model of the command line as it is compared: no parameter at zero or one, batches of what was traced alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from autopar.graph.graph import Graph
    from autopar.models.resolve import ModelSource


_NOISE = 0.02
"""Standard deviation of what is added to each parameter before ``verify``."""


def with_noise(model: torch.nn.Module) -> torch.nn.Module:
    """The same model, each parameter moved a little, in the same way each time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _NOISE
            parameter.add_(noise.to(parameter.dtype))
    return model


@dataclass(frozen=True)
class VerifiedModel:
    """A model whose batches hold only the inputs that were traced; every process makes the same one.

    With ``masked`` the padding mask is one of them; labels are ignored where a sample ends in any case.
    """

    source: ModelSource
    masked: bool

    def build(self) -> torch.nn.Module:
        """The model on CPU; no parameter is left at zero or one, where a wrong sum or factor would not show."""
        return with_noise(self.source.build())

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, torch.Tensor]:
        """Random inputs."""
        batch = self.source.make_batch(batch_size, seed=seed, padded=padded)
        names = batch if self.masked else self.source.example_inputs
        return {name: batch[name] for name in names if name in batch}

    def trace(
        self, *, global_batch_size: int | None = None, opaque: Sequence[str] = (), as_trained: bool = False
    ) -> Graph:
        """The graph on such batches.

        Args:
            global_batch_size: at which the model is traced where samples meet; without it they must be apart.
            opaque: modules that are not looked into.
            as_trained: with the noise that training draws, as plans are made for; otherwise a model that draws any
                is traced without dropping anything: what two processes draw cannot be compared, and one device, in
                float64 as well, runs without.
        """
        from autopar.graph.operator_kinds import draws_random
        from autopar.models.graph_for_plan import for_batch
        from autopar.models.resolve import without_dropout
        from autopar.planner.sharding.batch_axis import samples_apart
        from autopar.tracing.trace import trace as trace_model

        model = self.source.model

        def trace_at(samples: int | None) -> Graph:
            batch = self.make_batch(samples or self.source.batch_size, seed=0, padded=True)
            example = {name: value.to("meta") for name, value in batch.items()}
            options: dict[str, Any] = {"name": self.source.name, "opaque": opaque, "exact": samples is not None}
            return trace_model(model, (), example, **options)

        def trace_one() -> Graph:
            return (
                trace_at(None) if global_batch_size is None else for_batch(trace_at, global_batch_size, samples_apart)
            )

        graph = trace_one()
        if as_trained or not any(draws_random(op.target) or op.target == "autopar.dropout" for op in graph.ops):
            return graph
        model = copy.deepcopy(self.source.model)
        without_dropout(model)
        return trace_one()
