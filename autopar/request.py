"""What a plan is asked for: the keywords that ``search``, ``estimate``, ``trace`` and ``parallelize`` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, cast

from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import PRECISIONS, Precision, PrecisionName

if TYPE_CHECKING:
    from autopar.models.graph_for_plan import Inputs
    from autopar.tracing.trace import LossFunction

_EXAMPLES = {
    "cluster": "h100-sxm5-80gb:4x8",
    "precision": "bf16",
    "optimizer": "adamw",
    "space": "default",
    "sampler": "tpe",
}
"""What a text may be, of those arguments that take one."""

MOST_SAMPLES = 2**24
"""Of a global batch: a hundred times the largest that are published. Schedules of more micro-batches take minutes to simulate."""

SAMPLES_PER_RANK = 8
"""Of the global batch where neither it nor example inputs are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan is asked for. A keyword of any function of autopar means what it means here.

    Attributes:
        cluster: a :class:`~autopar.hardware.cluster.Cluster`, or a text that ``Cluster.parse`` reads: ``h100-sxm5-80gb:4x8``,
            ``local`` or the path of a TOML file.
        global_batch_size: samples of one optimizer step, over all ranks and micro-batches.
        example_inputs: a batch, by name or in order; made from its config for a Hugging Face model. Its number of samples does
            not matter.
        pins: constraints, as ``tp<=4`` (``autopar pins`` lists them).
        precision: ``bf16``: computation in bfloat16, parameters at rest and sums in float32; ``fp16``: in float16 likewise, and
            the loss is scaled (``ParallelModel.grad_scaler``); ``tf32``: float32 with products as GPUs make them under
            ``torch.set_float32_matmul_precision("high")``, which the training script sets; ``fp64``: all in float64; ``fp8`` is
            planned, and not run.
        optimizer: ``adamw``, ``adam``, ``momentum``, ``sgd`` or ``adafactor``; ``adamw:bytes=2`` declares the bytes of states
            for each element (8-bit optimizers).
        space: what may be chosen: the name of a shipped space (``quick``, ``default``, ``wide``, ``exhaustive``) or a TOML file.
        loss_fn: ``loss_fn(output, batch)`` gives the scalar loss, where the model does not.
        opaque: modules that run as they are written, by path, pattern or class name; see
            ``autopar.tracing.opaque_regions``.
        name: of the model in the plan.
        sampler: ``tpe``, ``cmaes`` or ``nsga2`` asks for a part of the candidates, however few there are, ``none`` for nothing;
            None: as the space says, where there are too many to be searched to the end.
        sampler_seed: of the sampler's random numbers; a search without a sampler draws none.
        cache_dir: where rules that are found by execution are kept; None for nowhere.
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
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        """One text is one pin or name, or several with commas between them, as in the shell; never one for each letter.

        >>> Request(pins="tp=2, pp=1").pins, Request(pins=["tp=2", "pp=1"]).pins
        (('tp=2', 'pp=1'), ('tp=2', 'pp=1'))

        Raises:
            UsageError: what has to be a text is none.
        """
        for name, example in (("pins", "tp<=4"), ("opaque", "layers.0.mlp")):
            object.__setattr__(self, name, _texts(name, getattr(self, name), example))
        for name, written in (("cluster", str), ("space", str), ("cache_dir", Path)):
            if isinstance(getattr(self, name), str | Path):
                object.__setattr__(self, name, written(getattr(self, name)))
        for name, example in _EXAMPLES.items():
            given = getattr(self, name)
            is_left_out = given is None and name in ("cluster", "sampler")
            if not (isinstance(given, str) or is_left_out or (name == "cluster" and isinstance(given, Cluster))):
                raise UsageError(
                    f"{name} takes a text, but got {_shown(given)}", fix=f"Write for example {name}='{example}'"
                )
        if not isinstance(self.cache_dir, Path | None):
            raise UsageError(f"The cache_dir is {_shown(self.cache_dir)}", fix="Give the path of a folder")
        for name in ("global_batch_size", "sampler_seed"):  # those of numpy are whole numbers too
            if isinstance(getattr(self, name), Integral):
                object.__setattr__(self, name, int(getattr(self, name)))
        if not isinstance(self.sampler_seed, int):
            raise UsageError(f"The sampler_seed is {_shown(self.sampler_seed)}", fix="Give a whole number")
        samples = self.global_batch_size
        if isinstance(samples, int) and samples > MOST_SAMPLES:
            raise UsageError(f"The global batch is {samples:.3g}", fix=f"Give at most {MOST_SAMPLES:,} samples")
        if samples is not None and (not isinstance(samples, int) or samples < 1):
            raise UsageError(f"The global batch is {_shown(samples)}", fix="Give a whole number of samples, at least 1")

    @property
    def recipe(self) -> Precision:
        """The precision by its name.

        Raises:
            UsageError: there is no such one.
        """
        if self.precision not in PRECISIONS:
            raise UsageError.unknown("precision", self.precision, PRECISIONS)
        return PRECISIONS[self.precision]


def _shown(given: object) -> str:
    """How an error shows what is no text: on one line, and cut off."""
    text = " ".join(repr(given).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _texts(name: str, given: object, example: str) -> tuple[str, ...]:
    """Several texts, or those of one that has commas.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, str):
        return tuple(part.strip() for part in given.split(",") if part.strip())
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else (given,)
    wrong = [one for one in found if not isinstance(one, str)]
    if wrong:
        raise UsageError(
            f"{name} takes texts, but got {_shown(wrong[0])}",
            fix=f"Write {name}=['{example}', ...] or {name}='{example},...'",
        )
    return cast("tuple[str, ...]", found)
