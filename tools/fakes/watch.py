"""What a program does on a device, operator by operator; imported in a process of its own alone, whose torch it changes."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._subclasses.fake_tensor as fakes
import torch.distributed.pipelining.schedules as schedules
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]
from torch.optim import adam
from torch.utils._python_dispatch import TorchDispatchMode

MIX, BLOCKS, SYNC, FORK = "devices mixed", "copy that blocks", "host waits", "state of generators kept"

VIEWS = frozenset(
    [
        "view",
        "t",
        "transpose",
        "expand",
        "unsqueeze",
        "detach",
        "detach_",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "as_strided",
        "alias",
        "permute",
        "squeeze",
        "_unsafe_view",
        "reshape",
        "unbind",
        "unflatten",
        "lift_fresh",
        "empty_like",
        "empty",
        "new_empty",
        "new_empty_strided",
        "empty_strided",
        "set_",
        "record_stream",
        "resize_",
        "is_same_size",
        "_reshape_alias",
        "narrow",
        "sym_size",
        "diagonal",
        "chunk",
        "unfold",
        "wait_tensor",
        "contiguous",
        "view_as",
        "flatten",
        "storage_offset",
        "is_pinned",
        "expand_as",
        "_conj",
        "resolve_conj",
        "view_dtype",
    ]
)
"""Operators that launch nothing."""

_READS = frozenset(
    [
        "_local_scalar_dense",
        "nonzero",
        "bincount",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
    ]
)
_ROOT = Path(__file__).parents[2]
_OTHERS = ("torch/distributed/fsdp", "torch/distributed/pipelining", "torch/optim", "torch/amp", "spmd_types")


class Record:
    """What was seen, by phase."""

    def __init__(self) -> None:
        self.phase, self.choices = "build", 0
        self.seen: Counter[tuple[str, str, str, str]] = Counter()
        self.launches: Counter[str] = Counter()

    def add(self, kind: str, what: str) -> None:
        """One of ``kind``, with the place in the project's code that made it."""
        self.seen[self.phase, kind, what, _place()] += 1


def _place() -> str:
    """The innermost line of the project, else of what calls it: file and function, as lines move."""
    frames = [frame for frame in traceback.extract_stack() if "tools/fakes" not in frame.filename]
    own = [frame for frame in frames if frame.filename.startswith(str(_ROOT / "autopar"))]
    others = [frame for frame in frames if any(part in frame.filename for part in _OTHERS)]
    found = next(iter(reversed(own or others)), None)
    if found is None:
        return "backward" if threading.current_thread() is not threading.main_thread() else "?"
    name = found.filename.split("site-packages/")[-1].removeprefix(f"{_ROOT}/")
    return f"{name}:{found.name}"


class Watch(TorchDispatchMode):
    """Counts launches, and sees devices that meet, copies that block and reads of the host."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look(str(func), args, kwargs)
        return func(*args, **kwargs)

    def _look(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        record, base = self.record, name.split(".")[1] if "." in name else name
        tensors = _tensors((*args, *kwargs.values()))
        kinds = {tensor.device.type for tensor in tensors}
        target = kwargs.get("device")
        made = torch.device(target).type if target is not None else None
        is_asked = name.startswith("prim.")  # a fake tensor's device, which is an attribute of a real one
        if ("cuda" in kinds or made == "cuda") and base not in VIEWS and not is_asked:
            record.launches[record.phase] += 1
        if base == "_to_copy" and tensors and made is not None and made != tensors[0].device.type:
            if not kwargs.get("non_blocking", False):
                record.add(BLOCKS, f"{tensors[0].device.type} to {made}")
        elif base == "copy_" and len(kinds) > 1:
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                record.add(BLOCKS, f"{args[1].device.type} to {args[0].device.type}")
        elif len(kinds - {"meta"}) > 1:
            numbers = all(not tensor.ndim for tensor in tensors if tensor.device.type == "cpu")
            if not numbers or base in {"stack", "cat"}:
                record.add(MIX, name)
        if "cuda" in kinds and (base in _READS or _reads_sizes(name, base, args, kwargs)):
            record.add(SYNC, name)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """All of an operator's arguments, which may be in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _reads_sizes(name: str, base: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the size of a result depends on values."""
    if base == "repeat_interleave" and "Tensor" in name:
        return kwargs.get("output_size") is None
    masks = args[1] if base in {"index", "index_put", "index_put_"} and len(args) > 1 else ()
    return any(isinstance(mask, Tensor) and mask.dtype in {torch.bool, torch.uint8} for mask in masks)


class _Stream:
    """One that does nothing."""

    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> Any:
        return torch.cuda.Event()

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 1


def install(record: Record) -> None:
    """Puts the stubs into torch, for good."""

    class Stream(_Stream):
        def synchronize(self) -> None:
            record.add(SYNC, "stream.synchronize")

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def wait(self, *_: Any) -> None: ...
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            record.add(SYNC, "event.synchronize")

        def elapsed_time(self, _: Any) -> float:
            return 1.0

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    @contextmanager
    def on_stream(_: Any) -> Iterator[None]:
        yield

    def state(*_: Any) -> Tensor:
        record.add(FORK, "cuda.get_rng_state")
        return torch.zeros(16, dtype=torch.uint8)

    def nothing(*_: Any, **__: Any) -> None: ...

    cuda: Any = torch.cuda
    properties = type("Properties", (), {"uuid": "0", "name": "NVIDIA H100 80GB HBM3", "total_memory": 80 << 30})()
    values = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "is_current_stream_capturing": lambda: False,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "memory_stats": lambda *_: {},
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "synchronize": lambda *_: record.add(SYNC, "cuda.synchronize"),
        "get_rng_state": state,
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "default_generators": (Generator(),),
    }
    for name, value in values.items():
        setattr(cuda, name, value)
    for name in (
        "set_device",
        "set_rng_state",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "_lazy_init",
    ):
        setattr(cuda, name, nothing)
    patched: Any = torch
    patched.Stream, patched.Event, patched.Generator = Stream, Event, Generator
    torch.accelerator.current_stream = lambda *_: Stream()  # type: ignore[assignment]
    _install_in_torch()
    _install_reads(record)


def _install_in_torch() -> None:
    """What torch itself asks a device for while tensors are fake."""
    allows = fakes.should_allow_numbers_as_tensors
    fakes.should_allow_numbers_as_tensors = lambda f: f is not torch.ops.aten._to_copy.default and allows(f)  # type: ignore[assignment]
    fakes.init_gpu_context = lambda *_: None  # type: ignore[assignment]
    # torch groups tensors of its own class alone into one kernel, which fake ones are not
    adam._default_to_fused_or_foreach = lambda given, *_, **__: (False, all(x.device.type == "cuda" for x in given))  # type: ignore[attr-defined]

    def no_vote(self: Any, stages: Any, *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedules._PipelineSchedule._warmup_p2p = no_vote  # type: ignore[assignment, method-assign]
    make_mesh = DeviceMesh.__init__

    def outside(self: Any, *args: Any, **options: Any) -> None:
        with fakes.unset_fake_temporarily():  # FSDP makes meshes, which look for this rank among their numbers
            make_mesh(self, *args, **options)

    DeviceMesh.__init__ = outside  # type: ignore[method-assign]
    tensor: Any = Tensor
    tensor.record_stream = lambda *_: None


def _filled(shape: Sequence[int], value: int) -> Any:
    return [_filled(shape[1:], value) for _ in range(shape[0])] if shape else value


def _install_reads(record: Record) -> None:
    """Reads of values that fake tensors do not have, and tensors that are made of the host's numbers on the device."""
    tensor: Any = Tensor
    made: Any = torch.tensor

    def reads(name: str, value: Any) -> None:
        own, real = getattr(tensor, name), getattr(FakeTensor, name)

        def read(self: Tensor) -> Any:
            if not isinstance(self, FakeTensor):
                return own(self)
            if self.device.type != "cuda":
                return real(self)
            record.add(SYNC, f"Tensor.{name}")
            return value(self) if callable(value) else value

        setattr(tensor, name, read)

    def counts(self: Tensor) -> Any:
        """As if routing were even; of one dim: where those of each expert end."""
        if self.ndim == 1:
            return [(i + 1) * record.choices // len(self) for i in range(len(self))]
        return _filled(self.shape, record.choices // self[0].numel())

    for name, value in (("item", 0.0), ("__int__", 0), ("__float__", 0.0), ("__bool__", False), ("tolist", counts)):
        reads(name, value)
    FakeTensor.tolist = tensor.tolist  # type: ignore[method-assign]

    def of_numbers(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return made(data, *args, device=device, **options)
        record.add(BLOCKS, "torch.tensor of the host's numbers")
        like = made(data, **options)
        return torch.zeros(like.shape, dtype=like.dtype, device=device)

    torch.tensor = of_numbers
