"""Measurement of operators one by one, at given shapes, on one device, as ``autopar profile ops`` runs it.

A call is the JSON text of :class:`autopar.hardware.link.OperatorTime`. Its tensors have random numbers; integer tensors have indices that
are valid for the operator. Backward is the time of ``torch.autograd.grad`` less what a call of the engine takes, since in training one call
serves the whole step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.hardware.link import load_json
from autopar.measure.timers import free_bytes, median_and_spread, sampler
from autopar.ops.collectives import on_meshes
from autopar.ops.kernels import resolve
from autopar.ops.seeded import draw
from autopar.util.files import check_same, write_json
from autopar.util.toml import Table

REPEATS = 15
MIN_BATCH_S = 1e-3
"""Seconds of one sample: short operators are called several times."""
OPERATOR_BUDGET_S = 0.5
"""Seconds for one direction of an operator; slower operators have fewer samples, but at least :data:`LEAST_REPEATS`."""
LEAST_REPEATS = 3
SAVE_EVERY_S = 5.0
ROOM = 6
"""Upper estimate of the memory of an operator with its gradients and temporaries, as a multiple of the bytes of operands and results."""

_POSITIVE = ("pow", "sqrt", "log", "reciprocal", "div")
"""Operators that get positive numbers."""

Progress = Callable[[str, int, int], None]


class _Tensors:
    """The arguments of one call, as tensors on a device.

    Attributes:
        made: its tensors in order.

    Raises:
        MemoryError: they do not fit the free memory.
    """

    def __init__(self, call: str, device: torch.device) -> None:
        self.target, args, kwargs, outputs = json.loads(call)
        self.device = device
        self.specs = _specs([args, *kwargs.values()])
        _check_room([*self.specs, *_specs(outputs)], device)
        self.made: list[torch.Tensor] = []
        self.args = pytree.tree_map(self._value, args, is_leaf=_is_leaf)
        self.kwargs = {name: pytree.tree_map(self._value, a, is_leaf=_is_leaf) for name, a in kwargs.items()}

    def _value(self, value: Any) -> Any:
        """Return a leaf of the arguments; tensors are filled, dtypes and devices are looked up."""
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "tensor":
            self.made.append(self._tensor(*inner))
            return self.made[-1]
        return self.device if kind == "device" else getattr(torch, inner)

    def _tensor(self, dtype_name: str, shape: list[int], requires_grad: bool) -> torch.Tensor:
        """Return a tensor with values that are valid for the operator."""
        dtype = getattr(torch, dtype_name)
        if dtype == torch.bool:
            return torch.ones(shape, dtype=dtype, device=self.device)
        if not dtype.is_floating_point and not dtype.is_complex:
            return torch.randint(0, self._limit(), shape, dtype=dtype, device=self.device)
        value = torch.randn(shape, device=self.device).to(dtype)
        if any(name in self.target for name in _POSITIVE):
            value = value.abs() + 0.1
        return value.requires_grad_(requires_grad)

    def _limit(self) -> int:
        """Return the limit below which integers are valid indices for the operator."""
        floats = [shape for dtype, shape, _ in self.specs if "float" in dtype and shape]
        if not floats:
            return 2
        if "experts" in self.target:
            return next((shape[0] for shape in floats if len(shape) == 3), 2)
        if "embedding" in self.target:
            return floats[0][0]
        if "cross_entropy" in self.target or "nll_loss" in self.target:
            return floats[0][1] if self.target.startswith("aten.") and len(floats[0]) > 2 else floats[0][-1]
        return min(floats[0])


Spec = tuple[str, list[int], bool]
"""Dtype, shape, and whether it requires a gradient."""


def _is_leaf(value: object) -> bool:
    """Return whether a value of the JSON text is one argument, not a list of several."""
    return not isinstance(value, list)


def _specs(values: list[Any]) -> list[Spec]:
    """Return the tensors in arguments."""
    leaves = pytree.tree_leaves(values, is_leaf=_is_leaf)
    return [tuple(leaf["tensor"]) for leaf in leaves if isinstance(leaf, dict) and "tensor" in leaf]


def _check_room(specs: Sequence[Spec], device: torch.device) -> None:
    """Raise ``MemoryError`` if tensors do not fit the free memory."""
    needed_bytes = ROOM * sum(getattr(torch, dtype).itemsize * torch.Size(shape).numel() for dtype, shape, _ in specs)
    if needed_bytes > (available_bytes := free_bytes(device)):
        raise MemoryError(f"needs about {needed_bytes:,} bytes, {available_bytes:,} are free")


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Give axes of one rank, over which operators with collectives are timed.

    If a process group exists already, nothing is set up and such operators fail.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("cp", "tp"))
        with on_meshes((mesh,)):
            yield
    finally:
        dist.destroy_process_group()


def time_call(call: str, device: torch.device, *, engine_s: float = 0.0) -> dict[str, Any]:
    """Return the entry of a call in the file of operator times.

    Raises:
        Exception: any error of the operator on random numbers, or the error that its tensors do not fit the memory.
    """
    tensors = _Tensors(call, device)
    function: Callable[..., Any] = resolve(tensors.target)
    if tensors.target.startswith("aten.") and any(name in tensors.target for name in ("rand", "bernoulli", "dropout")):
        inner = tensors.target

        def function(*args: Any, **kwargs: Any) -> Any:
            return draw(inner, *args, salt=0, device=None if tensors.made else device, **kwargs)

    def forward() -> Any:
        return function(*tensors.args, **tensors.kwargs)

    forward_s, spread, repeats = _median(forward, device)
    backward_s = 0.0
    result = forward()
    outputs = [out for out in (result if isinstance(result, tuple | list) else (result,)) if out.requires_grad]
    inputs = list(dict.fromkeys(tensor for tensor in tensors.made if tensor.requires_grad))
    if outputs and inputs:
        gradients = [torch.randn_like(out) for out in outputs]

        def backward() -> Any:
            return torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)

        whole_s, backward_spread, _ = _median(backward, device)
        backward_s, spread = max(whole_s - engine_s, 0.0), max(spread, backward_spread)
    return {"call": call, "forward_s": forward_s, "backward_s": backward_s, "spread": spread, "repeats": repeats}


def engine_s(device: torch.device) -> float:
    """Return the seconds of a call of ``torch.autograd.grad`` beyond the operators' backward, from chains of one and two views."""
    start = torch.ones(1, device=device, requires_grad=True)
    times = []
    for length in (1, 2):
        out = start
        for _ in range(length):
            out = out.view(1)
        gradient = torch.ones_like(out)
        run = lambda out=out, gradient=gradient: torch.autograd.grad(out, start, gradient, retain_graph=True)  # noqa: E731
        times.append(_median(run, device)[0])
    return max(2 * times[0] - times[1], 0.0)


def _median(function: Callable[[], object], device: torch.device) -> tuple[float, float, int]:
    """Return the median seconds of one warm call, the distance of the quartiles over it, and the number of samples."""
    sample = sampler(function, device, min_time_s=MIN_BATCH_S)
    repeats = int(min(REPEATS, max(LEAST_REPEATS, OPERATOR_BUDGET_S / max(sample(), 1e-9))))
    return *median_and_spread(sample() for _ in range(repeats)), repeats


class OperatorFile:
    """A file of operator times. Operators in it are not measured again.

    Args:
        path: the JSON file.
        device: names machine and software; a file of another device is refused.

    Raises:
        UsageError: the file is damaged, or of another device.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        self.times: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        if path.exists():
            data = load_json(path)
            check_same("The device of this file of operator times", path, expected=device, got=data.get("device"))
            table = Table(data, file=str(path))
            times = zip(table.tables("times"), data.get("times", ()), strict=True)
            self.times = {entry.text("call"): item for entry, item in times}
            self.failed = {entry.text("call"): entry.text("reason") for entry in table.tables("failed")}

    def save(self) -> None:
        """Write all times and failures."""
        failed = [{"call": call, "reason": reason} for call, reason in self.failed.items()]
        data = {"device": self.device, "times": list(self.times.values()), "failed": failed}
        write_json(self.path, data, make_folder=True)

    def measure(self, calls: Sequence[str], device: torch.device, *, progress: Progress = lambda *_: None) -> None:
        """Time the calls that are missing. The file is saved every few seconds and at the end, also after an error.

        A call that fails is kept with its reason and tried again in the next run.
        """
        missing = [call for call in calls if call not in self.times]
        if not missing:
            return
        saved = time.monotonic()
        try:
            with one_rank(device):
                engine = engine_s(device)
                for done, call in enumerate(missing):
                    progress(f"timing {json.loads(call)[0]}", len(calls) - len(missing) + done, len(calls))
                    self._time(call, device, engine)
                    if time.monotonic() - saved > SAVE_EVERY_S:
                        self.save()
                        saved = time.monotonic()
        finally:
            self.save()

    def _time(self, call: str, device: torch.device, engine: float) -> None:
        """Time one call, and keep its time or failure."""
        try:
            self.times[call] = time_call(call, device, engine_s=engine)
            self.failed.pop(call, None)
        except Exception as error:  # noqa: BLE001  one operator that cannot be run alone must not end the others
            self.failed[call] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
