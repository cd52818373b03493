"""What a step of a plan is: how it is run, and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from autopar.cost.blocks.block_cost import BlockCost
from autopar.mesh import Mesh
from autopar.plan import BUCKET_BYTES, Offload, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one optimizer step is run: what a prediction needs besides the stages.

    Attributes:
        mesh: degrees of the axes.
        schedule: its name.
        num_micro_batches: of each data rank.
        zero_stage: 0 to 3.
        global_batch_size: samples of the step.
        flops_per_sample: of the model, forward and backward, for the utilisation.
        tokens_per_sample: for the throughput.
        prelude_s: the operators that every stage repeats for each micro-batch.
        preludes_s: the same on each pipeline rank, where its devices differ from others'; empty: they do not.
        totals: bytes of each count of the global batch that the loss divides by.
        clips: the norm of all gradients is taken in the step; training does so by a call of its own.
        adds_gradients: counts the kernels of autograd that add a micro-batch's gradients to those before; the runtime of autopar has
            them, Megatron's ``gradient_accumulation_fusion`` has none.
        bucket_bytes: of gradients that are summed together (``Plan.bucket_bytes``).
        offload: what lives in host memory (``Plan.offload``).
    """

    mesh: Mesh
    schedule: str
    num_micro_batches: int
    zero_stage: int
    global_batch_size: int
    flops_per_sample: float
    tokens_per_sample: int
    prelude_s: float = 0.0
    preludes_s: tuple[float, ...] = ()
    adds_gradients: bool = False
    totals: tuple[int, ...] = ()
    clips: bool = False
    bucket_bytes: int = BUCKET_BYTES
    offload: tuple[Offload, ...] = ()

    def __hash__(self) -> int:
        """Of the fields that tell most steps apart: steps are keys of a table that is asked again and again."""
        return hash((self.mesh, self.schedule, self.num_micro_batches, self.zero_stage, self.bucket_bytes))

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the states of the optimizer live on the host."""
        return "optimizer" in self.offload


Runs: TypeAlias = tuple[tuple[tuple[BlockCost, Recompute], int], ...]
"""Blocks of a stage with what each recomputes, and how many equal ones follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Blocks that run as one stage, in order, and what of each is recomputed in backward."""

    blocks: tuple[BlockCost, ...]
    recompute: tuple[Recompute, ...]

    @property
    def runs(self) -> Runs:
        """Equal blocks that recompute alike, side by side, with their number: all that a stage is, and short as a key."""
        return tuple((one, len(list(some))) for one, some in groupby(zip(self.blocks, self.recompute, strict=True)))
