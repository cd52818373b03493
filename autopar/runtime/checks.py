"""Checks before a step and of attributes that a parallel model lacks, and the error of a step that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InternalError, OutOfMemoryError, RuntimeMismatchError, UsageError
from autopar.graph.graph import Evaluation
from autopar.graph.operator_kinds import OPAQUE
from autopar.hardware.describe import multiplies_in_tf32
from autopar.lower.program import Program
from autopar.plan.plan import TF32_PRODUCTS, Plan, Precision
from autopar.runtime.local_optimizer import LocalSteps
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.step.other_runs import EVALUATE_ALONE, replacements
from autopar.runtime.world import World
from autopar.util.formatting import num_bytes, some

_INSTEAD = {
    "module": "the model is what was given to autopar.parallelize; model.load_state_dict(par.full_state_dict())",
    "no_sync": "leave it out: gradients of steps are added up until zero_grad()",
    "backward": "par.train_step(batch) has done it; the loss of par(**batch) has one",
    "generate": "put par.full_state_dict() into the model itself, and generate with that",
    "config": "model.config, of the model that was given to autopar.parallelize",
    "is_first_rank": "par.is_main_process",
}
"""Attributes that users look for on a parallel model but that it lacks, with what to use instead."""


def absent(name: str, model: nn.Module | None) -> AttributeError:
    """Python's error that a parallel model has no such attribute, with what to use instead.

    Args:
        model: the model that was given to ``autopar.parallelize``, if it still exists.
    """
    text = f"A parallel model has no attribute {name!r}"
    if name in _INSTEAD:
        return AttributeError(f"{text}. Instead: {_INSTEAD[name]}")
    if model is None or name.startswith("_") or not hasattr(model, name):
        return AttributeError(text)
    if isinstance(getattr(model, name), nn.Module):
        return AttributeError(
            f"{text}: it has no layers, as its stages are programs made from the model. Its parameters are in "
            f"par.named_parameters() as {name}..., outputs of layers are what the model's forward returns"
        )
    return AttributeError(f"{text}. Instead: model.{name}, of the model that was given to autopar.parallelize")


def check_model(par: object, of: str) -> None:
    """Check the model that a function takes.

    Raises:
        UsageError: it is not parallel.
    """
    if not hasattr(type(par), "full_state_dict"):
        fix = "Pass what autopar.parallelize(model, ...) returns"
        raise UsageError(f"The model of {of} is a {type(par).__name__}", fix=fix)


def check_max_norm(max_norm: object) -> None:
    """Check the norm to which gradients are clipped.

    Raises:
        UsageError: it is no number, or a negative one.
    """
    is_number = not isinstance(max_norm, bool) and isinstance(max_norm, Real) and float(max_norm) >= 0
    if not is_number and not (isinstance(max_norm, Tensor) and max_norm.dim() == 0):
        raise UsageError(f"The max_norm is {max_norm!r}", fix="Write for example max_norm=1.0")


def check_can_run(precision: Precision) -> None:
    """Check that the runtime computes in this precision.

    Raises:
        RuntimeMismatchError: it does not.
    """
    if precision.needs_scales:
        raise RuntimeMismatchError(
            f"{precision.name} plans can be estimated but not run yet",
            fix='Make the plan with precision="bf16" or "fp16"',
        )


def check_modes(plan: Plan, device: torch.device, *, learns: bool) -> None:
    """Check that torch's modes let the step compute what the plan says.

    Args:
        learns: whether the step has a backward.

    Raises:
        UsageError: autocast is on, float32 products are computed in another way than planned, or gradients are off for a step that needs
            them.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise UsageError(
            f"A step cannot run inside torch.autocast to {dtype}: the plan computes in {plan.precision.compute}",
            fix='Leave autocast out, and choose the precision with the plan: autopar.parallelize(..., precision="bf16")',
        )
    if device.type == "cuda" and plan.precision.compute == "float32":
        _check_products(plan.precision)
    if learns and not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise UsageError(
            f"A training step needs gradients, but they are off (torch.{mode})",
            fix="Call par.evaluate(batch) for the loss alone",
        )


def _check_products(precision: Precision) -> None:
    wants_tf32 = precision.products == TF32_PRODUCTS
    if multiplies_in_tf32() == wants_tf32:
        return
    mode, other = ("high", "fp32") if wants_tf32 else ("highest", "tf32")
    raise UsageError.mismatch(
        f"How torch multiplies float32 matrices (precision {precision.name})",
        where="torch.backends.cuda.matmul",
        expected="TF32" if wants_tf32 else "float32",
        got="float32" if wants_tf32 else "TF32",
        fix=f'Call torch.set_float32_matmul_precision("{mode}") before the first step, or make the plan with precision="{other}"',
    )


class Parameters:
    """The parameters of a parallel model, checked for changes by the user.

    Args:
        held: parameters of all stages of this rank; those that require no gradient now never will.
    """

    def __init__(self, held: Sequence[RankParameter]) -> None:
        self._held = held
        self._frozen = tuple(h for h in held if not h.parameter.requires_grad)
        # kept, so that no other memory gets their addresses
        self._storages = [h.parameter.untyped_storage() for h in held]
        self._addresses = [storage._cdata for storage in self._storages]

    def check_memory(self) -> None:
        """Check before parameters are read that they are still on the memory that emitted code, FSDP and checkpoints read.

        Writes to that memory (``p.data.mul_``, ``copy_``, ``torch.nn.init``) take effect. ``p.data = tensor`` has no effect on any DTensor,
        as torch stores the new memory in the wrapper, which nobody reads. ``torch.utils.swap_tensors`` has none either.

        Raises:
            UsageError: the memory of some was replaced.
        """
        now = [h.parameter.untyped_storage()._cdata for h in self._held]
        if now == self._addresses:
            return
        pairs = zip(self._held, now, self._addresses, strict=True)
        replaced = [h.key for h, here, made in pairs if here != made]
        raise UsageError(
            f"The memory of {some(replaced)} was replaced (`p.data = ...`, torch.utils.swap_tensors)",
            fix="Write p.data.copy_(value) instead, with a DTensor of the same mesh: "
            "torch.distributed.tensor.distribute_tensor(tensor, p.device_mesh, p.placements) makes one",
        )

    def versions(self) -> list[int]:
        """Return how often each parameter has been written: as a DTensor, or this rank's part of it."""
        parameters = [h.parameter for h in self._held]
        return [p._version + (p._local_tensor._version if isinstance(p, DTensor) else 0) for p in parameters]

    def check_unwritten(self, versions: Sequence[int]) -> None:
        """Check before a backward that parameters are those of its forward, as torch does for one device.

        Args:
            versions: the result of :meth:`versions` at the forward.

        Raises:
            UsageError: some were written since.
        """
        now = zip(self._held, versions, self.versions(), strict=True)
        if written := [h.key for h, before, after in now if before != after]:
            raise UsageError(
                f"{some(written)} written between par(**batch) and the backward() of its loss: its gradient would mix old and new weights",
                fix="Call backward() before optimizer.step() and par.load(...), or compute the loss again",
            )

    def check(self) -> None:
        """Check parameters before a step. They may be frozen and unfrozen at any time, but what the plan has as frozen has no backward.

        Raises:
            UsageError: parameters were unfrozen that the plan has as frozen, have hooks on their gradients, or had their memory replaced.
        """
        self.check_memory()
        hooked = [h.key for h in self._held if h.parameter._backward_hooks or h.parameter._post_accumulate_grad_hooks]
        if hooked:
            raise UsageError.unsupported(
                f"A hook on a parameter ({some(hooked)})",
                instead="Remove it, and change gradients, or step, after train_step",
            )
        unfrozen = [h.key for h in self._frozen if h.parameter.requires_grad]
        if unfrozen:
            raise UsageError(
                f"{some(unfrozen)} cannot learn: frozen when the plan was made",
                fix="Set requires_grad on the model before autopar.parallelize, and freeze par.parameters() until they are to learn",
            )


def check_evaluates(program: Program) -> None:
    """Check that the program can compute what the model computes in ``eval()``.

    Raises:
        UsageError: it cannot.
    """
    evaluation = program.graph.evaluation or Evaluation(unknown="its graph was traced for a search alone")
    region = next((op for op in program.graph.prelude if op.target == OPAQUE), None)
    if region is not None:
        why = "an opaque region that no parameter leads to runs as in training"
        evaluation = Evaluation(unknown=why, where=region.source or region.module or region.name)
    if evaluation.unknown:
        raise UsageError(
            f"The model cannot be evaluated by its plan: {evaluation.unknown}",
            where=evaluation.where,
            fix=EVALUATE_ALONE,
        )
    bodies = [block.module for stage in program.stages for block in stage.blocks]
    bodies += [stage.prelude.module for stage in program.stages if stage.prelude is not None]
    found = {ref for body in bodies for ref in replacements(body.graph, evaluation)}
    missing = [str(ref) for ref, _ in evaluation.replaced if ref not in found]
    if missing:
        raise InternalError(f"The program does not compute {missing[0]}, which eval() replaces")


_ON_HOST = "can't allocate memory"
"""The message of torch's allocator for CPUs, in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that a device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _ON_HOST in str(error))


class MemoryReport:
    """Makes the error of a step that ran out of memory.

    Args:
        steps: the optimizer steps of this model.
    """

    def __init__(self, plan: Plan, world: World, held: Sequence[RankParameter], steps: LocalSteps) -> None:
        self._plan, self._world, self._held, self._steps = plan, world, held, steps

    def error(self) -> OutOfMemoryError:
        """Return the error with predicted and actual bytes of this rank by category, and what to pin."""
        device, planned, others = self._world.device, self._predicted(), list[str]()
        actual = {
            "parameters": _local_bytes((h.parameter for h in self._held), device),
            "gradients": _local_bytes((h.parameter.grad for h in self._held), device),
            "optimizer states": _local_bytes(self._steps.states(), device),
        }
        if device.type == "cuda":
            in_use = torch.cuda.max_memory_allocated(device) - sum(actual.values())
            actual["activations and temporaries"] = max(in_use, 0)
            free, total = torch.cuda.mem_get_info(device)
            reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
            others = [
                f"reserved by torch and not in use {num_bytes(reserved - allocated)}",
                f"CUDA itself and other processes {num_bytes(max(total - free - reserved, 0))}",
                f"of {num_bytes(total)} in all",
            ]
        rows = [
            f"{name} {num_bytes(actual[name])}" + (f" (predicted {num_bytes(planned[name])})" if planned else "")
            for name in actual
        ]
        return OutOfMemoryError(
            f"Rank {self._world.rank} ran out of memory on {device}",
            got=", ".join([*rows, *others]),
            fix=self._fix(planned, actual),
        )

    def _predicted(self) -> dict[str, int]:
        memory = next(iter(self._plan.memory_of(self._world.rank)), None)
        if memory is None:  # a plan without predictions
            return {}
        return {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer states": memory.optimizer,
            "activations and temporaries": memory.activations + memory.transient,
        }

    def _fix(self, planned: dict[str, int], actual: dict[str, int]) -> str:
        """Pins that need less of the category that exceeds its prediction by most over a tenth; of activations if none does."""
        plan = self._plan
        excess = {name: max(actual[name] - 1.1 * planned.get(name, actual[name]), 0.0) for name in actual}
        worst = max(excess, key=lambda name: excess[name])
        pins: list[str] = []
        if worst == "optimizer states" and excess[worst] > 0 and "optimizer" not in plan.offload:
            pins = [*(["zero=1"] if plan.zero_stage == 0 and plan.mesh.data > 1 else []), "offload=optimizer"]
        elif worst in ("parameters", "gradients") and excess[worst] > 0:
            pins = ["zero=3"] if plan.zero_stage < 3 and plan.mesh.data > 1 else []
        if not pins:
            pins = [] if plan.recompute.startswith("full") else ["recompute=full"]
            if plan.micro_batch_size > 1:
                pins.append(f"micro_batch={plan.micro_batch_size // 2}")
            if plan.zero_stage < 3 and plan.mesh.data > 1 and plan.mesh.pp == 1:
                pins.append("zero=3")
        if not pins:
            return "Plan for more devices, or for a smaller global batch"
        return f"Search a plan that needs less: pin {' or '.join(pins)}"


def _local_bytes(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    """Bytes of the local parts of tensors on the device, where memory that several share counts once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if isinstance(local, Tensor) and local.device.type == device.type:
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
