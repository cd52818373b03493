"""What optimizers keep and move, by torch's implementations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.cost.step.data_parallel import Unit
from autopar.errors import UsageError
from autopar.hardware.device import Device, HostLink


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """An optimizer of ``torch.optim`` that walks over all parameters, operator by operator (not fused).

    Attributes:
        states: tensors of a parameter's shape that it keeps, in the dtype of the parameter.
        is_factored: of parameters with two dims or more it keeps one row and one column instead (Adafactor).
        element_bytes: declared bytes of all states of one element, whatever the dtype; None: as ``states`` says.
        passes: times that a step reads or writes an element of a parameter, its gradient or a state.
        kernels: operators for one parameter (one for all of them on a GPU, where torch groups them).
        temporaries: tensors of a parameter's shape in passing.
    """

    states: int
    passes: int
    kernels: int
    temporaries: int
    is_factored: bool = False
    element_bytes: float | None = None

    def state_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that it keeps of a parameter, or of a shard of one."""
        numel = prod(shape)
        if self.element_bytes is not None:
            return math.ceil(numel * self.element_bytes)
        if self.is_factored and len(shape) > 1:
            return numel // max(shape[-1], 1) * itemsize + numel // max(shape[-2], 1) * itemsize
        return self.states * numel * itemsize

    def bytes_per_element(self, itemsize: int) -> float:
        """The same for each element of a large parameter."""
        if self.element_bytes is not None:
            return self.element_bytes
        return 0.0 if self.is_factored else float(self.states * itemsize)


_ADAM = OptimizerCost(states=2, passes=19, kernels=8, temporaries=1)
"""lerp (3), mul (2), addcmul (3), sqrt (2), div (2), add (2), addcdiv (4) and the step count (1)."""

OPTIMIZERS = {
    "adamw": OptimizerCost(states=2, passes=21, kernels=9, temporaries=1),
    "adam": _ADAM,
    "momentum": OptimizerCost(states=1, passes=8, kernels=3, temporaries=0),
    "sgd": OptimizerCost(states=0, passes=3, kernels=1, temporaries=0),
    "adafactor": OptimizerCost(states=1, passes=17, kernels=14, temporaries=1, is_factored=True),
}
"""adamw is adam and the decay of weights (2); momentum is mul (2), add (3), add (3); sgd is add (3).

adafactor is two norms (2), product of row and column (1), div (2), clamp (2), rsqrt (2), mul (3), norm of the update (1)
and of the parameter (1), add (3); one state of a parameter without two dims."""

_DECLARED = ":bytes="


def optimizer_cost(name: str) -> OptimizerCost:
    """The costs of an optimizer.

    Args:
        name: one of :data:`OPTIMIZERS`; ``NAME:bytes=N`` with N declared bytes of states for each element, as 8-bit
            optimizers have: 2 bytes of two moments, and 4 for each block of 256 of each (``adamw:bytes=2.03125``).

    Raises:
        UsageError: it is not known, or the bytes are no number from 0 on.
    """
    base, declared, text = name.lower().partition(_DECLARED)
    found = OPTIMIZERS.get(base)
    if found is None:
        raise UsageError.unknown(
            "optimizer", name, OPTIMIZERS, fix=f"or NAME{_DECLARED}N with N bytes of states for each element"
        )
    if not declared:
        return found
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < math.inf:
        raise UsageError(
            f"The optimizer '{name}' has no number of bytes of states for each element",
            fix="Give one from 0 on, for example adamw:bytes=2",
        )
    return replace(found, element_bytes=size)


def launched_s(optimizer: OptimizerCost, units: Sequence[Unit], device: Device, host: HostLink | None) -> float:
    """Seconds of starting the optimizer's operators; on a GPU torch groups those of all parameters.

    Args:
        host: where the optimizer steps there.
    """
    parameters = sum(unit.num_trained for unit in units)
    if host is not None:
        return optimizer.kernels * parameters * host.launch_s
    launch_s = device.overheads.sharded_launch_s or device.launch_s
    return optimizer.kernels * (1 if device.kind == "cuda" else parameters) * launch_s


def stepped_s(
    optimizer: OptimizerCost, units: Sequence[Unit], itemsize: int, device: Device, host: HostLink | None
) -> tuple[float, float]:
    """What the optimizer reads and writes; and, where it does so on the host, of copies: gradients down, parameters up.

    Nothing runs beside any of them: a step begins when gradients are summed and clipped, and forward waits for it. Checksums read
    the parameters on the device before and after (``autopar.runtime.local_optimizer``), which go down only where somebody else has written them.

    Args:
        itemsize: bytes of an element at rest.
        host: where the optimizer steps there.
    """
    size = sum(unit.trained_shard_numel for unit in units) * itemsize
    moved = optimizer.passes * size
    if host is None:
        return moved / device.memory_bandwidth_bytes_per_s, 0.0
    copies = 2 * sum(unit.num_trained for unit in units)
    copied_s = size / host.to_host_bytes_per_s + size / host.to_device_bytes_per_s + copies * host.latency_s
    copied_s += 2 * size / device.memory_bandwidth_bytes_per_s
    return moved / host.memory_bandwidth_bytes_per_s, copied_s
