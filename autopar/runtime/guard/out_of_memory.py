"""What a step that ran out of memory had planned and what it has, by category, and which pins need less."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autopar.errors import OutOfMemoryError
from autopar.plan.plan import Plan
from autopar.plan.prediction import Memory
from autopar.runtime.optimizer.local_step import LocalSteps
from autopar.runtime.step.gradients import Held
from autopar.runtime.world import World
from autopar.util.formatting import num_bytes

_ON_HOST = "can't allocate memory"
"""What torch's allocator for CPUs says, in a RuntimeError of no kind of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch says that a device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _ON_HOST in str(error))


class MemoryReport:
    """Makes the error of a step that ran out of memory.

    Args:
        steps: of this model's optimizers.
    """

    def __init__(self, plan: Plan, world: World, held: Sequence[Held], steps: LocalSteps) -> None:
        self._plan, self._world, self._held, self._steps = plan, world, held, steps

    def error(self, _: BaseException) -> OutOfMemoryError:
        """The error with predicted and actual bytes of this rank by category, and what to pin."""
        planned, actual = self._planned(), self._actual()
        rows = [
            f"{name} {num_bytes(actual[name])}" + (f" (predicted {num_bytes(planned[name])})" if planned else "")
            for name in actual
        ]
        return OutOfMemoryError(
            f"Rank {self._world.rank} ran out of memory on {self._world.device}",
            got=", ".join([*rows, *self._beside()]),
            fix=self._fix(planned, actual),
        )

    def _planned(self) -> dict[str, int]:
        memory = self._memory()
        if memory is None:
            return {}
        return {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer states": memory.optimizer,
            "activations and temporaries": memory.activations + memory.transient,
        }

    def _memory(self) -> Memory | None:
        """The prediction for this rank's part of the pipeline, or its node group; None in a plan without predictions."""
        rank, own = self._world.rank, self._plan.predicted.memory
        if self._plan.data_shares:
            group = next((i for i, g in enumerate(self._plan.groups) if g.start <= rank < g.stop), 0)
            return next((memory for memory in own if memory.group == group), None)
        return next((memory for memory in own if memory.pp_rank == self._world.coordinate["pp"]), None)

    def _actual(self) -> dict[str, int]:
        device = self._world.device
        found = {
            "parameters": _held_bytes((h.parameter for h in self._held), device),
            "gradients": _held_bytes((h.parameter.grad for h in self._held), device),
            "optimizer states": _held_bytes(self._steps.states(), device),
        }
        if device.type == "cuda":
            found["activations and temporaries"] = max(torch.cuda.max_memory_allocated(device) - sum(found.values()), 0)
        return found

    def _beside(self) -> list[str]:
        """What else takes the device's memory."""
        device = self._world.device
        if device.type != "cuda":
            return []
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        others = max(total - free - reserved, 0)
        return [
            f"reserved by torch and not in use {num_bytes(reserved - allocated)}",
            f"CUDA itself and other processes {num_bytes(others)}",
            f"of {num_bytes(total)} in all",
        ]

    def _fix(self, planned: dict[str, int], actual: dict[str, int]) -> str:
        """Pins that need less of what is a tenth more than planned; of activations where nothing is."""
        plan = self._plan
        excess = {name: max(actual[name] - 1.1 * planned.get(name, actual[name]), 0.0) for name in actual}
        worst = max(excess, key=lambda name: excess[name])
        pins: list[str] = []
        if worst == "optimizer states" and excess[worst] > 0:
            pins = [*(["zero=1"] if plan.zero_stage == 0 and plan.mesh.data > 1 else []), "offload=optimizer"]
            if "optimizer" in plan.offload:
                pins = []
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


def _held_bytes(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    """Of the parts that this rank has on the device, memory that several share counted once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if isinstance(local, Tensor) and local.device.type == device.type:
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
