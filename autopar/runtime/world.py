"""This rank's place in the mesh: its device, its process groups, and exchanges of objects between ranks."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug as tensor_debug

from autopar.errors import AutoparError, RuntimeMismatchError
from autopar.hardware.machine import num_cores
from autopar.plan.mesh import EXPERT_AXIS, EXPERT_MESH_AXES, MESH_AXES, Mesh
from autopar.runtime.job import DEFAULT_TIMEOUT_S, FAKE, how_to_start, local_device

_CLEARING = ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache")
"""Functions of ``torch.distributed.tensor.debug``: from torch 2.11 to 2.13 one cache became two, and the first name changed its meaning."""

DISKS = timedelta(hours=2)
"""Timeout of checkpoints. If a rank dies others notice it much earlier (:mod:`autopar.runtime.failure_watch`)."""


def _forget_meshes() -> None:
    """Clear DTensor's cache of operators, whose results hold the mesh of the first call.

    Meshes with the same layout of ranks are equal, even those of different jobs. If a process ends a job and begins another, cached results
    would have process groups of the old job, which no longer exist or belong to other ranks.
    """
    for name in _CLEARING:
        clear = getattr(tensor_debug, name, None)
        if clear is not None:
            clear()


_T = TypeVar("_T")


class Peers:
    """Exchanges objects between ranks; all ranks call the same methods in the same order.

    Args:
        group: all ranks, in a group that nothing else uses meanwhile; None if there is one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all_gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first_rank(self, make: Callable[[], _T]) -> _T:
        """Return the result of ``make`` on rank 0, on all ranks.

        Raises:
            AutoparError: what it raised; raised on all ranks.
        """
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [make()]
            except AutoparError as error:
                box = [error]
        if self.group is not None:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        if isinstance(box[0], AutoparError):
            raise box[0]
        result: _T = box[0]
        return result

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Enter the context of local work, at whose end all ranks know whether any has failed.

        Raises:
            AutoparError: of the first rank that failed; raised on all ranks.
        """
        failure: AutoparError | None = None
        try:
            yield
        except AutoparError as error:
            failure = error
        if failed := [error for error in self.all_gather(failure) if error is not None]:
            raise failed[0]


class World:
    """The ranks of a running job, laid out as a mesh.

    Attributes:
        mesh, rank: the plan's mesh, and this process's rank in it.
        data_index: the index of this rank's part of the global batch.
        device: the device of this rank's tensors.
        device_mesh: torch's mesh, with dims ``pp, dp_replicate, dp_shard, cp, tp``.
        expert_mesh: the same ranks with dims ``pp, ep_outer, ep_data, cp, tp``; None if no data ranks are borrowed for experts.
        meshes: the meshes for :func:`autopar.ops.collectives.on_meshes`.

    Args:
        collective_timeout_s: timeout of every collective in all groups made here, in seconds.

    Raises:
        RuntimeMismatchError: the job has another number of ranks than the mesh.
    """

    def __init__(self, mesh: Mesh, device_type: str, *, collective_timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        size = dist.get_world_size()
        if size != mesh.world_size:
            raise RuntimeMismatchError(
                f"This job has {size} rank{'s' * (size > 1)}, but the plan is for {mesh.world_size} ({mesh})",
                fix=f"{how_to_start(mesh.world_size)}, or search a plan for {size}",
            )
        _forget_meshes()
        self.mesh, self.rank = mesh, dist.get_rank()
        self._job: dist.ProcessGroup | None = dist.group.WORLD
        self.coordinate, self.data_index = mesh.coordinate(self.rank), mesh.data_index(self.rank)
        self.device = local_device(device_type)
        self.device_mesh: DeviceMesh = init_device_mesh(device_type, mesh.degrees, mesh_dim_names=MESH_AXES)
        self.expert_mesh: DeviceMesh | None = None
        self.meshes: tuple[DeviceMesh, ...] = (self.device_mesh,)
        if mesh.ep_data > 1:
            self.expert_mesh = init_device_mesh(device_type, mesh.expert_degrees, mesh_dim_names=EXPERT_MESH_AXES)
            joined = self.expert_mesh["ep_data", "tp"]._flatten(EXPERT_AXIS)
            self.meshes = (joined, self.expert_mesh, self.device_mesh)
        # spmd-types 0.3 calls functional collectives by names that torch 2.13 has deprecated
        warnings.filterwarnings("ignore", ".*_functional_collectives.*deprecated.*", FutureWarning)
        # emitted programs have no in-place operators, which alone could make returned views wrong
        warnings.filterwarnings("ignore", ".*FSDP(Block|Stage)Module.*returned a view tensor", UserWarning)
        self._timeout = timedelta(seconds=collective_timeout_s)
        for group in (group for dims in self.meshes for group in dims.get_all_groups()):
            if group is not dist.group.WORLD and dist.get_backend(group) != FAKE:  # the job's group keeps its timeout
                group._get_backend(torch.device(device_type))._set_default_timeout(self._timeout)
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        self._host_group: dist.ProcessGroup | None = None

    def check_job(self) -> None:
        """Check that the job in which this was made still runs.

        Raises:
            RuntimeMismatchError: its process group was ended. Groups made here have numbers as names; they are gone, or belong to another
                job now.
        """
        if self.mesh.world_size > 1 and dist.group.WORLD is not self._job:
            raise RuntimeMismatchError(
                "The process group that the parallel model was made in has ended"
                + (", and another one has begun" if dist.is_initialized() else ""),
                fix="Call save(...) before destroy_process_group(), and parallelize(...) and load(...) after init_process_group()",
            )

    def axis_group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one only on ``axes``; None if this is the only one.

        All ranks call this with the same axes in the same order.
        """
        wanted = tuple(axes)
        cut, _, _ = self.mesh.cut(wanted)
        split = tuple(axis for axis in cut if axis in wanted and getattr(self.mesh, axis) > 1)
        if not split:
            return None
        if len(split) == 1 and split[0] in MESH_AXES:
            return self.device_mesh.get_group(split[0])
        return self.partition_group(self.mesh.groups(split))

    def stage_group(self, pp_ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of ranks at ``pp_ranks`` of the pipeline whose other coordinates are those of this rank.

        All ranks call this; those at other pipeline ranks get None.
        """
        if len(set(pp_ranks)) < 2:
            return None
        chains = self.mesh.groups(("pp",))
        chosen = tuple(tuple(chain[i] for i in sorted(set(pp_ranks))) for chain in chains)
        return self.partition_group(chosen)

    def meeting_group(self, *, least: timedelta = timedelta(0)) -> dist.ProcessGroup | None:
        """Return a new group of all ranks on the host, for calls outside of steps; None if there is one rank. All ranks call this.

        It uses gloo, whatever the job has. It is separate because a backend matches calls in one group only by their order: it would match
        such a call on one rank with a collective of a step on another, and both would continue with wrong numbers. On the host it waits for
        no device, and takes none of its memory.

        Args:
            least: its timeout, unless that of all groups is longer.
        """
        if self.mesh.world_size == 1:
            return None
        backend = None if dist.get_backend() == FAKE else dist.Backend.GLOO
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=max(self._timeout, least))
        return group

    def sums_group(self) -> dist.ProcessGroup | None:
        """As :meth:`meeting_group`, for sums of tensors on the devices (a norm of all gradients)."""
        return None if self.mesh.world_size == 1 else dist.new_group(timeout=self._timeout)

    def host_group(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks for what a step compares on the host; None if there is one rank. All ranks call this.

        It is that of the job if that is on the host, otherwise one that is made once.
        """
        if self.mesh.world_size > 1 and dist.get_backend() in {dist.Backend.GLOO, FAKE}:
            return self._job
        if self._host_group is None:
            self._host_group = self.meeting_group()
        return self._host_group

    def host_threads(self) -> int | None:
        """Return this rank's share of the cores of its host; None on CPUs, where ranks compute on them. All ranks call this."""
        if self.device.type != "cuda":
            return None
        host, group = socket.gethostname(), self.host_group()
        num_ranks = self.mesh.world_size if dist.get_backend() == FAKE else Peers(group).all_gather(host).count(host)
        return max(num_cores() // num_ranks, 1)

    def partition_group(self, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """Return this rank's group among several disjoint ones, made once; None for a rank in none of them."""
        if groups == (tuple(range(self.mesh.world_size)),):
            return dist.group.WORLD
        if groups not in self._groups:
            made = [dist.new_group(list(group), timeout=self._timeout) for group in groups]
            self._groups[groups] = next((g for ranks, g in zip(groups, made, strict=True) if self.rank in ranks), None)
        return self._groups[groups]
