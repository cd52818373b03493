"""Test help: all ranks of a small mesh as threads of this process, and graphs run on whole tensors."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from autopar.graph import interpreter
from autopar.graph.graph import Graph, Ref
from autopar.ops import collectives
from autopar.plan.mesh import EXPERT_AXIS, EXPERT_MESH_AXES, MESH_AXES, Mesh

TIMEOUT_S = 60.0
"""For all ranks together."""

_RUNS = itertools.count()
_HERE = threading.local()


class _Group(ProcessLocalGroup):
    """A group whose collectives meet those of the same run alone: what a failed run leaves behind joins no later one."""

    @property
    def pg_name(self) -> str:
        return f"{self.run}.{self.group_name}"

    @property
    def group_name(self) -> str:
        return str(self._world().pg_names[self])

    @property
    def run(self) -> int:
        return self._run

    def _get_backend(self, device: torch.device) -> "_Group":
        """What torch 2.14 asks of a group before it sends in batches."""
        return self

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        """Buffered: it never waits for who receives."""
        return _MAIL.post((self.pg_name, self.rank(), to, tag), sent=[x.detach().clone() for x in tensors])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return _MAIL.post((self.pg_name, source, self.rank(), tag), wanted=[x.detach() for x in tensors])

    @staticmethod
    def make(store: Any, rank: int, size: int, timeout: Any) -> "_Group":
        dist.distributed_c10d._store_based_barrier(rank, store, "", size, timeout)
        group = _Group(rank, size)
        group._run = _HERE.run
        return group


class _Mail:
    """Messages between the threads of a run, in order for each pair of ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[object, list[list[torch.Tensor]]] = {}
        self._wanted: dict[object, list[tuple[list[torch.Tensor], torch.futures.Future[Any]]]] = {}

    def post(
        self, key: object, *, sent: list[torch.Tensor] | None = None, wanted: list[torch.Tensor] | None = None
    ) -> Any:
        """Takes a message or the wish for one; gives what waits until it is there."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            if sent is not None:
                self._sent.setdefault(key, []).append(sent)
                done: torch.futures.Future[Any] = torch.futures.Future()
                done.set_result(sent)
            if wanted is not None:
                self._wanted.setdefault(key, []).append((wanted, future))
            while self._sent.get(key) and self._wanted.get(key):
                message, (places, waiting) = self._sent[key].pop(0), self._wanted[key].pop(0)
                for place, value in zip(places, message, strict=True):
                    place.copy_(value)
                waiting.set_result(places)
        return _create_work_from_future(done if wanted is None else future)

    def close(self) -> None:
        with self._lock:
            for waiting in self._wanted.values():
                for _, future in waiting:
                    future.set_exception(RuntimeError("the sender has failed"))
            self._wanted.clear()
            self._sent.clear()


_MAIL = _Mail()
dist.Backend.register_backend("rank_threads", _Group.make, devices=["cpu"])


def run_ranks(mesh: Mesh, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` on every rank, with the mesh set; raises what a rank raised. Whatever happens to a rank, or to the caller while it
    waits, the others are ended before this returns."""
    world = dist.distributed_c10d._world
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    with (
        FakeTensorMode()
    ):  # torch 2.11 for CUDA, without a GPU, keeps its stand-in for one in the thread that needs it first
        store, run = dist.HashStore(), next(_RUNS)
    results: list[Any] = [None] * mesh.world_size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        _HERE.run = run
        try:
            dist.init_process_group("rank_threads", rank=rank, world_size=mesh.world_size, store=store)
            device_mesh = init_device_mesh("cpu", mesh.degrees, mesh_dim_names=MESH_AXES)
            _HERE.meshes = (device_mesh,)
            if mesh.ep_data > 1:
                expert_mesh = init_device_mesh("cpu", mesh.expert_degrees, mesh_dim_names=EXPERT_MESH_AXES)
                _HERE.meshes = (expert_mesh["ep_data", "tp"]._flatten(EXPERT_AXIS), expert_mesh, device_mesh)
            with torch.autograd.set_multithreading_enabled(False), collectives.on_meshes(_HERE.meshes):
                results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(mesh.world_size)]
    limit = time.monotonic() + TIMEOUT_S
    try:
        for thread in threads:
            thread.start()
        while not errors and time.monotonic() < limit and (alive := [t for t in threads if t.is_alive()]):
            alive[0].join(0.1)
        assert errors or not any(thread.is_alive() for thread in threads), "a rank hangs"
    finally:
        _end(threads)
        _uninstall_threaded_pg()
        dist.distributed_c10d._world = world
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
    if errors:
        raise errors[0]
    return results


def these_meshes() -> tuple[DeviceMesh, ...]:
    """The device meshes of the rank that the calling thread is: the job's last, before it those of experts."""
    return _HERE.meshes


def this_mesh() -> DeviceMesh:
    """The job's device mesh, of the rank that the calling thread is."""
    return these_meshes()[-1]


def axis_group(axis: str) -> dist.ProcessGroup:
    """This rank's group on any axis of its meshes, ``ep_outer`` too."""
    mesh = next(mesh for mesh in reversed(these_meshes()) if axis in (mesh.mesh_dim_names or ()))
    return mesh.get_group(axis)


def _end(threads: list[threading.Thread]) -> None:
    """Wakes ranks that wait for one that will not come, until all are gone."""
    limit = time.monotonic() + 10
    while (alive := [t for t in threads if t.is_alive()]) and time.monotonic() < limit:
        ProcessLocalGroup._terminate.set()
        _MAIL.close()
        with ProcessLocalGroup._coll_lock:
            waiting = list(ProcessLocalGroup._cur_coll_on_pgs.values())
        for collective in waiting:
            for condition in (collective._start_cond, collective._done_cond):
                with condition:
                    condition.notify_all()
        alive[0].join(0.02)


def interpret(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a graph, run operator by operator on whole tensors (by name of input and parameter)."""
    env = {Ref(name): tensor for name, tensor in tensors.items()}
    env |= {Ref(b.name): b.value for b in graph.buffers if b.value is not None}
    interpreter.run((*graph.prelude, *graph.ops), env)
    return env[graph.loss]


def slice_of(tensor: torch.Tensor, layout: Any, mesh: Mesh, rank: int) -> torch.Tensor:
    for axis, kind in layout:
        if kind.is_split and axis in (*MESH_AXES, "ep_data"):
            here = {**mesh.coordinate(rank), "ep_data": mesh.data_index(rank) % mesh.ep_data}
            tensor = tensor.chunk(getattr(mesh, axis), kind.dim)[here[axis]]
    return tensor
