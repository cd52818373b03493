"""The request for a plan: the keywords that ``search``, ``estimate``, ``trace`` and ``parallelize`` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from autopar.errors import UsageError, shown, whole
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import MOST_SAMPLES, PRECISIONS, Precision, PrecisionName

if TYPE_CHECKING:
    from autopar.models.graph_for_plan import Inputs
    from autopar.tracing.model_with_loss import LossFunction

_EXAMPLES = {
    "cluster": "h100-sxm5-80gb:4x8",
    "precision": "bf16",
    "optimizer": "adamw",
    "space": "default",
    "sampler": "tpe",
    "name": "my-model",
}
"""An example value of each argument that takes a string, for error messages."""

SAMPLES_PER_RANK = 8
"""Samples of the global batch for each rank if neither the global batch nor example inputs are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asks a plan for. A keyword of any public function has the meaning that is documented here.

    Attributes:
        cluster: a :class:`~autopar.hardware.cluster.Cluster`, or a string for ``Cluster.parse``: ``h100-sxm5-80gb:4x8``,
            ``local`` or the path of a TOML file.
        global_batch_size: samples of one optimizer step, over all ranks and micro-batches.
        example_inputs: a batch, as a mapping by name or a sequence by position. Its number of samples does not matter. For a
            Hugging Face model it can be left out: it is then made from the model's config.
        pins: constraints such as ``tp<=4`` (``autopar pins`` lists them).
        precision: ``bf16`` computes in bfloat16, and keeps parameters and sums in float32. ``fp16`` does the same with float16,
            and scales the loss (``ParallelModel.grad_scaler``). ``tf32`` is float32 with the products of GPUs under
            ``torch.set_float32_matmul_precision("high")``, which the training script sets. ``fp64`` uses float64 everywhere.
            ``fp8`` can be planned, but not run.
        optimizer: ``adamw``, ``adam``, ``momentum``, ``sgd`` or ``adafactor``. ``adamw:bytes=2`` declares the bytes of optimizer
            states for each element (8-bit optimizers).
        space: the search space: the name of a shipped one (``quick``, ``default``, ``wide``, ``exhaustive``) or a TOML file.
        loss_fn: ``loss_fn(output, batch)`` returns the scalar loss, for a model whose forward does not.
        opaque: modules that run as they are written, by path, pattern or class name; see
            ``autopar.tracing.opaque_regions``.
        name: the name of the model in the plan.
        sampler: ``tpe``, ``cmaes`` or ``nsga2`` samples the candidates, however few there are; ``none`` never samples. None
            leaves it to the space, which samples only if there are too many candidates for a complete search.
        sampler_seed: the seed of the sampler; a search without a sampler draws no random numbers.
    """

    cluster: Cluster | str | None = None
    global_batch_size: int | None = None
    example_inputs: Inputs | None = None
    pins: Sequence[str] = ()
    precision: PrecisionName | str = "fp32"
    optimizer: str = "adamw"
    space: str = "default"
    loss_fn: LossFunction | None = None
    opaque: Sequence[str] = ()
    name: str = ""
    sampler: str | None = None
    sampler_seed: int = 0

    def __post_init__(self) -> None:
        """Convert arguments to their field types; a string of ``pins`` or ``opaque`` is split at commas, as in the shell.

        >>> Request(pins="tp=2, pp=1").pins, Request(pins=["tp=2", "pp=1"]).pins
        (('tp=2', 'pp=1'), ('tp=2', 'pp=1'))

        Raises:
            UsageError: an argument that has to be a string is not one, or the seed is not an integer.
        """
        for name, example in (("pins", "tp<=4"), ("opaque", "layers.0.mlp")):
            object.__setattr__(self, name, _texts(name, getattr(self, name), example))
        for name in ("cluster", "space"):
            if isinstance(getattr(self, name), str | Path):
                object.__setattr__(self, name, str(getattr(self, name)))
        for name, example in _EXAMPLES.items():
            value = getattr(self, name)
            is_left_out = value is None and name in ("cluster", "sampler")
            if not (isinstance(value, str) or is_left_out or (name == "cluster" and isinstance(value, Cluster))):
                raise UsageError(
                    f"{name} takes a text, but got {shown(value)}", fix=f"Write for example {name}='{example}'"
                )
        object.__setattr__(self, "sampler_seed", whole("sampler_seed", self.sampler_seed))
        if self.global_batch_size is not None:
            samples = whole("global batch", self.global_batch_size, least=1, most=MOST_SAMPLES)
            object.__setattr__(self, "global_batch_size", samples)

    @property
    def recipe(self) -> Precision:
        """The dtypes of the requested precision.

        Raises:
            UsageError: there is no precision of this name.
        """
        if self.precision not in PRECISIONS:
            raise UsageError.unknown("precision", self.precision, PRECISIONS)
        return PRECISIONS[self.precision]


def _texts(name: str, value: object, example: str) -> tuple[str, ...]:
    """Return the strings of the argument ``name``: a sequence of strings, or one string that is split at commas.

    Raises:
        UsageError: the value is neither.
    """
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, Mapping) else (value,)
    wrong = [item for item in items if not isinstance(item, str)]
    if wrong:
        raise UsageError(
            f"{name} takes texts, but got {shown(wrong[0])}",
            fix=f"Write {name}=['{example}', ...] or {name}='{example},...'",
        )
    return cast("tuple[str, ...]", items)
