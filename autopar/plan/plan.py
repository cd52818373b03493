"""The plan: the result of a search, as plain data that can be printed, serialised, compared and run.

A plan holds all that the runtime needs, and the predictions of the cost model. It does not refer back to the search.
``autopar.plan.file`` reads and writes plans, and ``autopar.report`` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from autopar.errors import UsageError
from autopar.plan.mesh import Mesh, Type
from autopar.plan.prediction import Memory, Prediction
from autopar.plan.schedule import ScheduleName
from autopar.util.toml import RARE

if TYPE_CHECKING:
    from autopar.plan.text import Change

FORMAT_VERSION = 1
"""The version of the format of plan files."""

BUCKET_BYTES = 25 * 2**20
"""The default of ``Plan.bucket_bytes``, which is that of DDP too."""

Recompute = Literal["none", "selective", "full"]
"""What backward of a block recomputes: nothing, cheap operators (:mod:`autopar.graph.operator_kinds`), or all operators."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
Offload = Literal["optimizer"]
"""What is kept in host memory between its uses: ``optimizer`` means the optimizer states, which are updated on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that a plan is for; ``fingerprint`` is that of its traced graph."""

    name: str
    fingerprint: str
    num_parameters: int
    flops_per_sample: float
    """Floating-point operations of forward and backward, without recompute."""
    tokens_per_sample: int
    """Elements of the first input of the batch for one sample; 1 if it is not a sequence of ids."""


TF32_PRODUCTS = "tf32"
"""A mode of the process in which products of float32 use 10 of the 23 mantissa bits (NVIDIA A100 white paper), and sums use float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a plan, by torch's names (``float32``, ``bfloat16``).

    Attributes:
        name: the name of the precision in requests.
        compute: the dtype of activations, and of parameters where operators read them.
        storage: the dtype of parameters at rest and of optimizer states.
        reduce: the dtype in which gradients are summed.
        products: the dtype in which activations and weights are multiplied, if it is not ``compute``: ``float8_e4m3fn``, or ``tf32`` for
            products of float32 as GPUs make them if they are allowed to.
    """

    name: str = "fp32"
    compute: str = "float32"
    storage: str = "float32"
    reduce: str = "float32"
    products: str = field(default="", metadata=RARE)

    @property
    def needs_scales(self) -> bool:
        """Whether each tensor has to be scaled into the range of a dtype, which the runtime does not support."""
        return self.products.startswith("float8")

    @property
    def rate(self) -> str:
        """The dtype whose rate in a device's profile applies to products without casts."""
        return TF32_PRODUCTS if self.products == TF32_PRODUCTS else self.compute

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, because gradients can be below the range of the dtype; steps with infinities are then skipped."""
        return self.compute == "float16"


FP32 = Precision()
BF16 = Precision(name="bf16", compute="bfloat16", storage="float32", reduce="float32")
FP16 = Precision(name="fp16", compute="float16", storage="float32", reduce="float32")
FP8 = Precision(name="fp8", compute="bfloat16", storage="float32", reduce="float32", products="float8_e4m3fn")
"""bf16 with the products of linears in 8 bits, in forward and backward."""
TF32 = Precision(name="tf32", products=TF32_PRODUCTS)
"""fp32 with products as under ``torch.set_float32_matmul_precision("high")`` on GPUs."""
FP64 = Precision(name="fp64", compute="float64", storage="float64", reduce="float64")
"""The precision for comparisons: two runs that differ by more than its rounding differ for another reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTyping:
    """The typing of equal blocks on one axis (``batch`` or ``tp``).

    Attributes:
        axis: the axis.
        strategies: the name of the chosen strategy of each operator of the block, in order.
        parameters: the type at rest of each of ``Graph.block_parameters``, in order.
        parameter_names: the names of these parameters relative to the label of the block (``mlp.up_proj.weight``), for people; empty or
            as many as ``parameters``.
        boundary: the type of each of ``Graph.block_outputs``, for people; may be empty.
    """

    axis: str
    strategies: tuple[str, ...]
    parameters: tuple[Type, ...]
    parameter_names: tuple[str, ...] = ()
    boundary: tuple[Type, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The layout of blocks of one hash; several layouts may be for the same hash (as of the first and the last block)."""

    block_hash: str
    typings: tuple[AxisTyping, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedParameter:
    """A parameter that is padded with zeros along its vocabulary to ``length``.

    ``parameter`` is its name in checkpoints, which contain it without the padding.
    """

    parameter: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block; ``layout`` is an index into ``Plan.layouts``."""

    index: int
    label: str
    layout: int
    recompute: Recompute = "none"
    offload: bool = field(default=False, metadata=RARE)
    """Whether the activations that the block keeps for backward are in host memory; with full recompute these are its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The blocks ``start:stop``, which run as one (virtual) pipeline stage on pipeline rank ``pp_rank``."""

    index: int
    start: int
    stop: int
    pp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """The record of the search. By the same cost model no plan of the search space is faster than ``lower_bound_s``."""

    wall_time_s: float
    candidates: int
    evaluated: int
    lower_bound_s: float
    gap: float
    reasons: tuple[str, ...] = ()
    """Sentences on why this plan was chosen and not similar ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks ``start:stop``, which are on equal nodes with devices ``device``."""

    start: int
    stop: int
    device: str

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the group."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to train one model on one cluster.

    Attributes:
        model: the model that the plan is for.
        cluster: the cluster as given (``h100-sxm5-80gb:4x8``); its number of devices must equal the ranks of the mesh.
        mesh: the degrees of the axes.
        global_batch_size: samples of one optimizer step, over all ranks and micro-batches.
        micro_batch_size: samples that one data rank takes through the model at once.
        schedule: the pipeline schedule.
        virtual_stages: the stages of each pipeline rank; the pipeline has ``pp * virtual_stages``.
        zero_stage: the ZeRO stage over ``dp_shard``, 0 to 3; 0 means ``dp_shard == 1``.
        precision: the dtypes.
        optimizer: the name of the optimizer, which decides memory and time (``adamw``, ``sgd``, ``momentum``).
        prelude: the names of the strategies of the prelude's operators on axis ``batch``.
        layouts: the layouts of blocks.
        blocks: the blocks, in order of the model.
        stages: the pipeline stages, in order of the model.
        predicted: the prediction of the cost model.
        search: the record of the search.
        padding: parameters that are longer than those of the model, so that they are split evenly over ``tp`` and aligned.
        pins: the pins as the user wrote them.
        notes: remarks for the reader (replicated operators, opaque regions).
        opaque: the opaque modules as the user named them; a trace for this plan needs them.
        groups: groups of ranks, if nodes differ; the job has to number its nodes in this order. Empty if all nodes are equal.
        offload: what is kept in host memory.
        bucket_bytes: the bytes of gradients from which on an all-reduce takes no further ones.
        data_shares: for each of ``groups`` the samples that one of its data ranks takes through the model at once, if these differ;
            ``micro_batch_size`` is then the largest. Empty if all take ``micro_batch_size``.
        vocab_multiple: the rows of each rank's part of a vocabulary are a multiple of this; 1 pads only for an even split.
        version: the version of the format.
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
        """The number of micro-batches of one step on each data rank."""
        if not self.data_shares:
            return self.global_batch_size // (self.micro_batch_size * self.mesh.data)
        sizes = (share * group.num_ranks for group, share in zip(self.groups, self.data_shares, strict=True))
        return self.global_batch_size // sum(sizes)

    def micro_batch_of(self, data_rank: int) -> int:
        """Return the samples that a data rank takes through the model at once."""
        if not self.data_shares:
            return self.micro_batch_size
        shares = zip(
            self.groups, self.data_shares, strict=True
        )  # such plans have no pp, cp and tp: a rank is a data rank
        return next(share for group, share in shares if data_rank < group.stop)

    def memory_of(self, rank: int) -> tuple[Memory, ...]:
        """Return the predicted memory of a rank, which is at most one entry."""
        pp_rank = self.mesh.coordinate(rank)["pp"]
        group = next((i for i, g in enumerate(self.groups) if rank < g.stop), 0) if self.data_shares else 0
        return tuple(m for m in self.predicted.memory if (m.pp_rank, m.group) == (pp_rank, group))

    def samples_of(self, data_rank: int) -> range:
        """Return the samples of the global batch that a data rank takes in a step; they are consecutive, in the order of data ranks."""
        before = (
            sum(map(self.micro_batch_of, range(data_rank))) if self.data_shares else data_rank * self.micro_batch_size
        )
        count = self.num_micro_batches
        return range(count * before, count * (before + self.micro_batch_of(data_rank)))

    @property
    def recompute(self) -> str:
        """The recompute mode of all blocks, or the share of each mode (``full 12/32``, ``selective 20/32, full 12/32``)."""
        return recompute_text(self.blocks)

    def devices_of(self, pp_rank: int) -> tuple[str, ...]:
        """Return the devices of a pipeline rank; empty if all nodes are equal."""
        share = self.mesh.world_size // self.mesh.pp
        first, last = pp_rank * share, (pp_rank + 1) * share
        return tuple(dict.fromkeys(g.device for g in self.groups if g.start < last and first < g.stop))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, completely or not at all; see :func:`autopar.plan.file.save_plan`."""
        # imported here and below, as these modules import this one
        from autopar.plan.file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of :meth:`save` or ``autopar search -o``; see :func:`autopar.plan.file.load_plan`."""
        from autopar.plan.file import load_plan

        return load_plan(path)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as the JSON values of its file."""
        from autopar.plan.file import plan_to_dict

        return plan_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan of a result of :meth:`to_dict`.

        Raises:
            PlanError: the data is not a plan; the error names the path in it, what was expected there, and what was found.
        """
        from autopar.plan.file import plan_from_dict

        return plan_from_dict(data)

    def diff(self, other: Plan) -> list[Change]:
        """Return how ``other`` differs in choices and predictions; each difference has its path and the values before and after.

        Raises:
            UsageError: ``other`` is no plan.
        """
        from autopar.plan.text import diff_plans

        if not isinstance(other, Plan):
            raise UsageError(f"Plan.diff takes a plan, but got {other!r}", fix="Read a file by Plan.load(PATH)")
        return diff_plans(self, other)

    def __str__(self) -> str:
        from autopar.plan.text import render_plan

        return render_plan(self)


def recompute_text(blocks: Sequence[BlockPlan]) -> str:
    """Return the recompute mode if all blocks have the same, otherwise the share of each mode except ``none``."""
    counts = {mode: sum(block.recompute == mode for block in blocks) for mode in RECOMPUTES}
    if len(blocks) in counts.values():
        return next(mode for mode, count in counts.items() if count == len(blocks))
    return ", ".join(f"{mode} {n}/{len(blocks)}" for mode, n in counts.items() if n and mode != "none") or "none"


MOST_SAMPLES = 2**24
"""Of a global batch: a hundred times the largest that are published. Schedules of more micro-batches take minutes to simulate."""

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"]

PRECISIONS = {cast("PrecisionName", precision.name): precision for precision in (FP32, TF32, BF16, FP16, FP8, FP64)}
"""All precisions by name. fp8 can only be planned; the runtime supports all others. fp16 needs a scaler (``ParallelModel.grad_scaler``)."""
