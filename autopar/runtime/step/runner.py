"""Forward and backward over the micro-batches of a rank, accumulated or by a pipeline schedule of torch, and the step's gradient sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import get_schedule_class

from autopar.errors import PlanError
from autopar.graph.graph import Input
from autopar.graph.operator_kinds import region_gradients
from autopar.lower.program import Program
from autopar.plan.plan import Plan
from autopar.plan.run_log import COMPUTE, DATA, PIPELINE
from autopar.plan.schedule import check_schedule
from autopar.runtime.assemble import Assembly, before_backward
from autopar.runtime.monitor import Monitor
from autopar.runtime.step.gradients import Branches, BucketedSums, hand_over, sum_in_place, unshare_gradients
from autopar.runtime.step.stage import INPUT, StageModule
from autopar.runtime.world import World


class StepGradients:
    """Prepares gradients before the first backward of a step, and sums them after the last."""

    def __init__(self, assembly: Assembly, program: Program, monitor: Monitor, group: dist.ProcessGroup | None) -> None:
        self._monitor, self._tied = monitor, assembly.tied
        plan, without_gradient = program.plan, program.graph.without_gradient()
        self._branches = Branches(assembly.stages, assembly.held, region_gradients(program.graph), group)
        held = (h for h in assembly.held if h.name in without_gradient)
        self._without = [(h.parameter, without_gradient[h.name]) for h in held]
        self._leaf_sums = BucketedSums(assembly.held, bucket_bytes=plan.bucket_bytes)
        self._late = [h for h in assembly.held if h.leaf is None and h.group is not None]
        # gradients of earlier steps, which sums in place must not include
        in_place = (h.parameter for h in chain(self._late, *self._tied) if h.parameter.requires_grad)
        self._earlier: dict[nn.Parameter, Tensor | None] = dict.fromkeys(in_place)
        self._part = DATA if plan.mesh.data > 1 else COMPUTE
        self.is_open = False

    def begin(self, num_backwards: int) -> None:
        """Begin a step of ``num_backwards`` backward passes: its gradients are kept apart from earlier ones until they are summed."""
        if self.is_open:
            return
        self.is_open = True
        self._branches.begin()
        for parameter in self._earlier:
            self._earlier[parameter], parameter.grad = parameter.grad, None
        self._leaf_sums.begin(num_backwards)

    def finish(self) -> None:
        """Sum the gradients after the last backward, and add them to those of earlier steps."""
        if not self.is_open:
            return
        self.is_open = False
        with self._monitor.part(self._part):
            self._leaf_sums.finish()
        sum_in_place(self._late, lambda held: held.group)
        self._sum_tied()
        for parameter in self._earlier:
            earlier, self._earlier[parameter] = self._earlier[parameter], None
            if earlier is not None:
                new = parameter.grad
                parameter.grad = earlier if new is None else earlier.add_(new)
        for parameter, is_part in self._without:  # an optimizer decays what has zeros, and leaves what has none
            parameter.grad = torch.zeros_like(parameter) if is_part and parameter.requires_grad else None
        self._branches.finish()

    def _sum_tied(self) -> None:
        """Sum the gradients of the copies of each tied parameter on this rank, then over ranks, and give all copies the sum."""
        for first, *others in self._tied:
            for other in others:
                if other.gradient is not None:
                    hand_over(first.parameter, other.gradient)
        sum_in_place([first for first, *_ in self._tied], lambda held: held.tie_group)
        for first, *others in self._tied:
            for other in others:
                if first.gradient is not None:
                    other.parameter.grad = None
                    hand_over(other.parameter, first.gradient.clone())

    def abandon(self) -> None:
        """Restore the earlier gradients after a step that failed, in which some micro-batches may have added theirs."""
        if self.is_open:
            self.is_open = False
            for parameter in self._earlier:
                parameter.grad, self._earlier[parameter] = self._earlier[parameter], None


Batch = Mapping[str, Tensor]
Scaled: TypeAlias = Callable[[Tensor], Tensor]


def micro_batches(batch: Batch, inputs: Sequence[Input], count: int) -> list[dict[str, Tensor]]:
    """Cut a rank's samples into ``count`` equal micro-batches, which are views."""
    batches: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for leaf in inputs:
        value = batch[leaf.name]
        dim = leaf.batch_dim
        parts = [value] * count if dim is None else torch.split(value, value.shape[dim] // count, dim)
        for micro_batch, part in zip(batches, parts, strict=True):
            micro_batch[leaf.name] = part
    return batches


class Accumulation:
    """Runs one stage: micro-batches in sequence, whose gradients accumulate; backward starts from ``scaled(loss)``."""

    def __init__(self, stage: StageModule, plan: Plan, inputs: Sequence[Input], scaled: Scaled) -> None:
        self.stage, self._plan, self._inputs, self._scaled = stage, plan, inputs, scaled

    def run(self, batch: Batch, count: int) -> Tensor:
        """Run forward and backward of this rank's samples, in ``count`` micro-batches; return its part of the loss."""
        total: Tensor | None = None
        without_gradient = list[nn.Parameter]()
        for number, micro_batch in enumerate(micro_batches(batch, self._inputs, count)):
            if count > 1:  # with one micro-batch FSDP's settings are those of the last
                before_backward(self.stage, self._plan, is_last=number == count - 1)
            loss = self.forward(micro_batch, number)
            self._scaled(loss).backward()  # type: ignore[no-untyped-call]
            without_gradient = unshare_gradients(self.stage.parameters() if number == 0 else without_gradient)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def evaluate(self, batch: Batch, count: int) -> Tensor:
        """As :meth:`run`, with forward only and without gradients."""
        parts = micro_batches(batch, self._inputs, count)
        with torch.no_grad():
            return torch.stack([self.forward(part, number) for number, part in enumerate(parts)]).sum()

    def forward(self, micro_batch: dict[str, Tensor], number: int) -> Tensor:
        """Return the loss of one micro-batch, with its autograd graph."""
        self.stage.micro_batch = number
        loss: Tensor = self.stage(**micro_batch)
        return loss


class Pipeline:
    """Runs several stages by ``torch.distributed.pipelining``; each stage gets the batch inputs as keywords.

    Backward starts from ``scaled(loss)``, which has the value of the loss.

    Raises:
        PlanError: the plan has ZeRO 2.
        UsageError: its schedule cannot run with so many stages or micro-batches.
    """

    def __init__(
        self, stages: Sequence[StageModule], program: Program, world: World, monitor: Monitor, scaled: Scaled
    ) -> None:
        self._stages, self._program, self._monitor = stages, program, monitor
        plan = program.plan
        check_schedule(plan.schedule, plan.mesh.pp, plan.virtual_stages, plan.num_micro_batches)
        if plan.zero_stage == 2:
            raise PlanError(
                "A pipeline cannot use ZeRO 2, as it reduces gradients at the end of a step", fix="Pin zero=1 or zero=3"
            )
        group = world.device_mesh.get_group("pp")
        self._group, self._device = group, world.device
        self._rank_of = {stage.index: dist.get_global_rank(group, stage.pp_rank) for stage in program.stages}
        self._received = {module.index: tuple(p.example() for p in module.passed_in) for module in stages}
        self._make_communicators()
        wrapped = [
            _Stage(
                monitor,
                module,
                module.index,
                len(program.stages),
                world.device,
                input_args=self._received[module.index],
                output_args=tuple(p.example() for p in module.passed_on),
                group=group,
            )
            for module in stages
        ]
        chunked = {leaf.name: leaf.batch_dim for leaf in program.graph.inputs if leaf.batch_dim is not None}
        self._chunked = tuple(chunked)
        self._numbers = torch.arange(plan.num_micro_batches)
        options: dict[str, Any] = {
            "n_microbatches": plan.num_micro_batches,
            "loss_fn": lambda output, _: scaled(output),  # the last stage's graph ends in the loss
            "kwargs_chunk_spec": {INPUT + name: TensorChunkSpec(dim) for name, dim in chunked.items()},  # type: ignore[no-untyped-call]
            "scale_grads": False,
        }
        kind: Any = get_schedule_class(plan.schedule)
        self._schedule = kind(wrapped if plan.schedule == "Interleaved1F1B" else wrapped[0], **options)

    def run(self, batch: Batch, count: int) -> Tensor | None:
        """As :meth:`Accumulation.run`; None on ranks without the last stage.

        If there are more micro-batches than the schedule has, it runs several times.
        """
        schedule_count, inputs = self._program.plan.num_micro_batches, self._program.graph.inputs
        unsplit = {leaf.name: batch[leaf.name] for leaf in inputs if leaf.name not in self._chunked}
        part_losses: list[Tensor] = []
        for turn, part in enumerate(micro_batches(batch, inputs, count // schedule_count)):
            for stage in self._stages:
                stage.first_micro_batch, stage.totals = turn * schedule_count, stage.totals | unsplit
            keywords, losses = {INPUT + name: part[name] for name in self._chunked}, list[Tensor]()
            with self._monitor.part(PIPELINE):  # waiting for neighbours; the work of stages is a part of its own
                self._schedule.step(target=self._numbers, losses=losses, return_outputs=False, **keywords)
            part_losses += [loss.detach() for loss in losses]
        return torch.stack(part_losses).sum() if part_losses else None

    def evaluate(self, batch: Batch, count: int) -> Tensor | None:
        """As :meth:`run`, with forward only and without gradients.

        Micro-batches run in sequence, without torch's schedules, which drop gradients when they switch to evaluation.
        """
        losses, sent = list[Tensor](), list[tuple[Sequence[Tensor], dist.Work]]()  # tensors live until they are sent
        with torch.no_grad(), self._monitor.part(PIPELINE):
            for number, part in enumerate(micro_batches(batch, self._program.graph.inputs, count)):
                local: dict[int, tuple[Tensor, ...]] = {0: ()}
                for stage in self._stages:
                    received = local[stage.index] if stage.index in local else self._receive(stage.index)
                    stage.micro_batch = number
                    with _naming_stage(stage.index):
                        outputs = stage(*received, **part)
                    if stage.is_last:
                        losses.append(outputs)
                    elif self._rank_of[stage.index + 1] == self._rank_of[stage.index]:
                        local[stage.index + 1] = outputs
                    else:
                        works = self._exchange(dist.isend, outputs, self._rank_of[stage.index + 1])
                        sent += [(outputs, work) for work in works]
        for _, work in sent:
            work.wait()
        return torch.stack(losses).sum() if losses else None

    def _receive(self, index: int) -> tuple[Tensor, ...]:
        tensors = tuple(torch.empty_like(spec, device=self._device) for spec in self._received[index])
        for work in self._exchange(dist.irecv, tensors, self._rank_of[index - 1]):
            work.wait()
        return tensors

    def _exchange(self, direction: Any, tensors: Sequence[Tensor], peer: int) -> list[dist.Work]:
        """Send or receive as one batch, which on GPUs uses the existing communicator of the group and makes none for the two ranks."""
        works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(direction, x, peer, self._group) for x in tensors])
        return works

    def _make_communicators(self) -> None:
        """Make the communicators between stages before the first step, so that none is made in the middle of the schedule.

        Torch's schedules use a communicator of two ranks for single sends, and that of the group for sends in both directions at once. All
        ranks of the group go through the pairs in the order of the stages, so there is no deadlock.
        """
        ranks = [self._rank_of[index] for index in sorted(self._rank_of)]
        pairs = dict.fromkeys((min(a, b), max(a, b)) for a, b in pairwise(ranks) if a != b)
        rank, both = dist.get_rank(), list[dist.P2POp]()
        for first, second in pairs:
            if rank not in {first, second}:
                continue
            call, peer = (dist.isend, second) if rank == first else (dist.irecv, first)
            token = torch.zeros(1, device=self._device)
            work = call(token, peer, group=self._group)
            assert work is not None
            work.wait()
            both += [dist.P2POp(call, torch.zeros_like(token), peer, self._group) for call in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(both) if both else ():
            work.wait()


class _Stage(PipelineStage):
    """A stage whose work the monitor tells from waiting, and whose module knows the number of its micro-batch.

    The number is passed by an attribute. FSDP would move a tensor among the keywords to the GPU, and reading it there makes the host wait
    for all work that it has launched.
    """

    def __init__(self, monitor: Monitor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._monitor = monitor
        self._without_gradient: list[nn.Parameter] = []  # so far in the step

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        module = cast("StageModule", self.submod)
        module.micro_batch = module.first_micro_batch + fwd_chunk_id
        with self._monitor.part(COMPUTE), _naming_stage(self.stage_index):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._monitor.part(COMPUTE), _naming_stage(self.stage_index):
            result = super().backward_one_chunk(bwd_chunk_id, *args, **options)
            unknown = self.submod.parameters() if bwd_chunk_id == 0 else self._without_gradient
            self._without_gradient = unshare_gradients(unknown)
            return result


@contextmanager
def _naming_stage(index: int) -> Iterator[None]:
    """Add the stage to an error, and raise the model's error instead of torch's, which wraps it in a list of tensors."""
    try:
        yield
    except Exception as error:  # any kind, as it is raised again
        cause = error.__cause__
        first = cause if isinstance(error, RuntimeError) and isinstance(cause, Exception) else error
        first.add_note(f"pipeline stage {index}")
        if first is error:
            raise
        raise first from first.__cause__
