"""How an optimizer step is run."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.frozen import quickly
from autopar.mesh import Mesh
from autopar.plan import BUCKET_BYTES, Offload


@quickly
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
        blocking_sends: messages between stages occupy both ranks, as when they stand in the stream of computation
            (DeepSpeed's pipeline); the runtime of autopar does not wait for them.
        partitioned_sends: each rank of ``tp`` sends its part of a message that all of them hold, and the receivers gather
            it (DeepSpeed's ``is_pipe_partitioned``, Megatron's scatter and gather); the runtime of autopar sends it whole.
        copied_sends: such messages are DeepSpeed's ``PartitionedTensor``, which copies and fills besides (:func:`copies_s` of
            :mod:`autopar.cost.step.stage_time`).
        late_reductions: gradients are summed over the data axes after the last backward, nothing beside them (Megatron until
            2022); the runtime of autopar sums them beside it.
        reduces_last: at ZeRO 2 and 3 too whole gradients are kept from micro-batch to micro-batch, and reduced at the last one
            alone (FSDP2's ``set_requires_gradient_sync(False)``); the runtime of autopar reduces those of each.
        quantized_gathers: parameters are gathered in the byte an element that fp8 products take (torchtitan's and Megatron's
            float8 gathers); the runtime of autopar gathers the compute dtype.
        totals: bytes of each count of the global batch that the loss divides by.
        clips: the norm of all gradients is taken in the step; training does so by a call of its own.
        overlapped_reductions: those after a pipeline's last backward run beside it and the next step's forwards (Megatron's
            ``overlap_grad_reduce`` and ``overlap_param_gather``); the runtime of autopar waits for them.
        adds_gradients: counts the kernels of autograd that add a micro-batch's gradients to those before; Megatron's
            ``gradient_accumulation_fusion`` has none; the runtime of autopar has them.
        casts_gradients: a kernel of its own casts each gradient before it is added to a sum in a longer dtype (DeepSpeed's
            BF16_Optimizer); torch's adds do so inside.
        gathers_after_step: at ZeRO 1 and 2 all ranks gather parameters at once when they have been stepped (DeepSpeed,
            Megatron), so that no stage's first forward waits for those of the stages before; the runtime of autopar gathers
            in each stage's first forward (FSDP2).
        all_reduces: gradients are summed whole on every data rank although each steps a part (DeepSpeed's BF16_Optimizer); the
            runtime of autopar scatters the sums.
        broadcasts: at ZeRO 1 each parameter is stepped whole by one rank of dp_shard, which sends it to the others, one after
            the other, where those of this file gather (InternEvo and ColossalAI); the runtime of autopar gathers.
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
    blocking_sends: bool = False
    partitioned_sends: bool = False
    copied_sends: bool = False
    overlapped_reductions: bool = False
    gathers_after_step: bool = False
    adds_gradients: bool = False
    casts_gradients: bool = False
    all_reduces: bool = False
    broadcasts: bool = False
    late_reductions: bool = False
    reduces_last: bool = False
    quantized_gathers: bool = False
    totals: tuple[int, ...] = ()
    clips: bool = False
    bucket_bytes: int = BUCKET_BYTES
    offload: tuple[Offload, ...] = ()

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the states of the optimizer live on the host."""
        return "optimizer" in self.offload
