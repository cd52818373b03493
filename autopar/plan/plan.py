"""The plan: the result of a search, as plain data that can be printed, serialised, compared and run.

It has everything that the runtime needs, and predictions; nothing refers back to the search. ``autopar.plan.file`` reads and writes plans,
``autopar.report`` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from autopar.plan.mesh import Mesh, Type
from autopar.plan.prediction import RARE, Memory, Prediction

if TYPE_CHECKING:
    from autopar.plan.text import Change

FORMAT_VERSION = 1


BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients from which on an all-reduce takes no more, by default; DDP uses the same value."""

Recompute = Literal["none", "selective", "full"]
"""What backward of a block recomputes: nothing, cheap operators (:mod:`autopar.graph.operator_kinds`), or all of it."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
Offload = Literal["optimizer"]
"""What is in host memory between its uses: ``optimizer`` is the states of optimizers, which step on the host."""

ScheduleName = Literal["none", "GPipe", "1F1B", "Interleaved1F1B"]
"""``none``: one stage, whose micro-batches are accumulated in sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Which model a plan is for; ``fingerprint`` is that of its traced graph."""

    name: str
    fingerprint: str
    num_parameters: int
    flops_per_sample: float
    """Forward and backward, without recompute."""
    tokens_per_sample: int
    """Elements of the first batch input of one sample, 1 if it is not a sequence of ids."""


TF32_PRODUCTS = "tf32"
"""Products of float32 that use 10 of each number's 23 bits (NVIDIA A100 white paper), summed in float32: a mode of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Which dtype is used where, by torch's names (``float32``, ``bfloat16``).

    ``compute``: parameters at their use, activations. ``storage``: parameters at rest, optimizer
    states. ``reduce``: gradient sums. ``products``: in which activations and weights are multiplied, where it
    is another one than ``compute``: ``float8_e4m3fn``, or ``tf32`` for what GPUs multiply float32 in if they are allowed to.
    """

    name: str = "fp32"
    compute: str = "float32"
    storage: str = "float32"
    reduce: str = "float32"
    products: str = field(default="", metadata=RARE)

    @property
    def needs_scales(self) -> bool:
        """Whether tensors have to be scaled into the range of a dtype one by one, which the runtime does not do."""
        return self.products.startswith("float8")

    @property
    def rate(self) -> str:
        """The dtype whose rate in a device's profile applies to products for which no tensor is cast."""
        return TF32_PRODUCTS if self.products == TF32_PRODUCTS else self.compute

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are below the range of the dtype: the loss is scaled into it, and steps with infinities are skipped."""
        return self.compute == "float16"


FP32 = Precision()
BF16 = Precision(name="bf16", compute="bfloat16", storage="float32", reduce="float32")
FP16 = Precision(name="fp16", compute="float16", storage="float32", reduce="float32")
FP8 = Precision(name="fp8", compute="bfloat16", storage="float32", reduce="float32", products="float8_e4m3fn")
"""bf16, with the products of linears in 8 bits forward and backward."""
TF32 = Precision(name="tf32", products=TF32_PRODUCTS)
"""fp32, with products as under ``torch.set_float32_matmul_precision("high")`` on GPUs."""
FP64 = Precision(name="fp64", compute="float64", storage="float64", reduce="float64")
"""For comparisons: a difference of two runs beyond its rounding is not rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTyping:
    """The typing of one class of blocks on one axis (``batch`` or ``tp``).

    ``strategies``: the name of the chosen strategy for each operator of the block, in order.
    ``parameters``: the type at rest of each of ``Graph.block_parameters``, in order.
    ``parameter_names``: for people, names of these parameters relative to the block's label
    (``mlp.up_proj.weight``); empty or as many as ``parameters``.
    ``boundary``: for people, the type of each of ``Graph.block_outputs``; may be empty.
    """

    axis: str
    strategies: tuple[str, ...]
    parameters: tuple[Type, ...]
    parameter_names: tuple[str, ...] = ()
    boundary: tuple[Type, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """How blocks of one hash are laid out; two layouts may share a hash (first and last block)."""

    block_hash: str
    typings: tuple[AxisTyping, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedParameter:
    """A parameter made longer with zeros along its vocabulary: ``length`` is the padded one.

    ``parameter``: its name in checkpoints, which hold it without the padding.
    """

    parameter: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block: ``layout`` counts in ``Plan.layouts``."""

    index: int
    label: str
    layout: int
    recompute: Recompute = "none"
    offload: bool = field(default=False, metadata=RARE)
    """What it keeps for backward lives on the host in the meantime; with recompute that is what it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Blocks ``start:stop`` run as one (virtual) pipeline stage on pipeline rank ``pp_rank``."""

    index: int
    start: int
    stop: int
    pp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """How the plan was found. ``lower_bound_s``: no plan in the space is faster by the same cost model."""

    wall_time_s: float
    candidates: int
    evaluated: int
    lower_bound_s: float
    gap: float
    reasons: tuple[str, ...] = ()
    """Sentences: why this plan and not its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks ``start:stop`` stand on equal nodes."""

    start: int
    stop: int
    device: str

    @property
    def num_ranks(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to train one model on one cluster.

    Attributes:
        model: what it is for.
        cluster: as given (``h100-sxm5-80gb:4x8``); ``world_size`` must equal the mesh's.
        mesh: degrees of the axes.
        global_batch_size: samples of one optimizer step, over all ranks and micro-batches.
        micro_batch_size: samples one data rank takes through the model at once.
        schedule, virtual_stages: of the pipeline; stages = pp * virtual_stages.
        zero_stage: 0 to 3, over ``dp_shard`` (0 means ``dp_shard == 1``).
        optimizer: its name for memory and time (``adamw``, ``sgd``, ``momentum``).
        prelude: strategy names of the prelude operators on axis ``batch``.
        layouts, blocks, stages: see there; blocks in order, stages in order of the model.
        padding: parameters that are longer than the model's, so that they split evenly over ``tp`` and are aligned.
        vocab_multiple: of the rows of each rank's part of a vocabulary; 1: as ``padding`` needs for a split alone.
        pins: as the user wrote them.
        notes: what a reader should know (replicated operators, opaque regions).
        opaque: modules that the user named as opaque, as they were named: a trace for this plan needs them.
        groups: of ranks, where nodes differ: the job has to number its nodes in this order. Empty: all are equal.
        offload: what lives in host memory.
        bucket_bytes: of gradients that are summed together: an all-reduce of as many or more takes no further ones.
        data_shares: for each of ``groups`` the samples that one of its data ranks takes through the model at once, where
            that is not the same for all; ``micro_batch_size`` is then the largest. Empty: all take ``micro_batch_size``.
    """

    model: ModelInfo
    cluster: str
    mesh: Mesh
    global_batch_size: int
    micro_batch_size: int
    schedule: ScheduleName
    virtual_stages: int
    zero_stage: int
    precision: Precision
    optimizer: str
    prelude: tuple[str, ...]
    layouts: tuple[BlockLayout, ...]
    blocks: tuple[BlockPlan, ...]
    stages: tuple[StagePlan, ...]
    predicted: Prediction
    search: SearchRecord
    padding: tuple[PaddedParameter, ...] = ()
    pins: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    groups: tuple[RankGroup, ...] = ()
    offload: tuple[Offload, ...] = field(default=(), metadata=RARE)
    bucket_bytes: int = field(default=BUCKET_BYTES, metadata=RARE)
    data_shares: tuple[int, ...] = field(default=(), metadata=RARE)
    vocab_multiple: int = field(default=1, metadata=RARE)
    version: int = FORMAT_VERSION

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on each data rank."""
        if not self.data_shares:
            return self.global_batch_size // (self.micro_batch_size * self.mesh.data)
        sizes = (share * group.num_ranks for group, share in zip(self.groups, self.data_shares, strict=True))
        return self.global_batch_size // sum(sizes)

    def micro_batch_of(self, data_rank: int) -> int:
        """Samples that a data rank takes through the model at once."""
        if not self.data_shares:
            return self.micro_batch_size
        shares = zip(self.groups, self.data_shares, strict=True)  # without pipeline, cp and tp a rank is a data rank
        return next(share for group, share in shares if data_rank < group.stop)

    def memory_of(self, rank: int) -> tuple[Memory, ...]:
        """The predicted memory of a rank: at most one entry."""
        pp_rank = self.mesh.coordinate(rank)["pp"]
        group = next((i for i, g in enumerate(self.groups) if rank < g.stop), 0) if self.data_shares else 0
        return tuple(m for m in self.predicted.memory if (m.pp_rank, m.group) == (pp_rank, group))

    def samples_of(self, data_rank: int) -> range:
        """The samples of the global batch that a data rank takes in a step; they are consecutive, in the order of data ranks."""
        before = (
            sum(map(self.micro_batch_of, range(data_rank))) if self.data_shares else data_rank * self.micro_batch_size
        )
        count = self.num_micro_batches
        return range(count * before, count * (before + self.micro_batch_of(data_rank)))

    @property
    def recompute(self) -> str:
        """``none``, ``full``, or the share of blocks (``full 12/32``, ``selective 20/32, full 12/32``)."""
        return recompute_text(self.blocks)

    def devices_of(self, pp_rank: int) -> tuple[str, ...]:
        """The devices of a pipeline rank; empty if all nodes are equal."""
        share = self.mesh.world_size // self.mesh.pp
        first, last = pp_rank * share, (pp_rank + 1) * share
        return tuple(dict.fromkeys(g.device for g in self.groups if g.start < last and first < g.stop))

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, completely or not at all; see :func:`autopar.plan.file.save_plan`."""
        # imported here and below, as these modules import this one
        from autopar.plan.file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a file of :meth:`save` or ``autopar search -o``; see :func:`autopar.plan.file.load_plan`."""
        from autopar.plan.file import load_plan

        return load_plan(path)

    def to_dict(self) -> dict[str, Any]:
        """The plan as the JSON values of its file."""
        from autopar.plan.file import plan_to_dict

        return plan_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan of a result of :meth:`to_dict`.

        Raises:
            PlanError: names the path in the document, what was expected there, and what there is.
        """
        from autopar.plan.file import plan_from_dict

        return plan_from_dict(data)

    def diff(self, other: Plan) -> list[Change]:
        """The differences of ``other``, in choices and predictions, each with its path, before and after."""
        from autopar.plan.text import diff_plans

        return diff_plans(self, other)

    def __str__(self) -> str:
        from autopar.plan.text import render_plan

        return render_plan(self)


def recompute_text(blocks: Sequence[BlockPlan]) -> str:
    """How blocks recompute: the mode if all have the same, otherwise the share of each mode that is not ``none``."""
    counts = {mode: sum(block.recompute == mode for block in blocks) for mode in RECOMPUTES}
    if len(blocks) in counts.values():
        return next(mode for mode, count in counts.items() if count == len(blocks))
    return ", ".join(f"{mode} {n}/{len(blocks)}" for mode, n in counts.items() if n and mode != "none") or "none"


PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"]


PRECISIONS = {cast("PrecisionName", one.name): one for one in (FP32, TF32, BF16, FP16, FP8, FP64)}
"""Precisions by name. The runtime runs all but fp8, which can only be planned; fp16 needs a scaler (``ParallelModel.grad_scaler``)."""
