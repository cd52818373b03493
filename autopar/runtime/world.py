"""This rank's place in the mesh: its device and process groups, and what ranks tell each other by these."""

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
"""Of ``torch.distributed.tensor.debug``: torch 2.11 to 2.13 divide one cache in two, and the first of the names changed its sense."""

DISKS = timedelta(hours=2)
"""A rank that has died is noticed by others long before (:mod:`autopar.runtime.failure_watch`)."""


def _forget_meshes() -> None:
    """Clears what DTensor remembers of operators: its results hold the mesh that they were first asked for.

    Meshes are equal whose ranks are laid out alike, whatever job they are of. In a process that ended a job and began another
    a result of the new one would have groups of the old, whose names are unknown now, or those of other ranks.
    """
    for name in _CLEARING:
        clear = getattr(tensor_debug, name, None)
        if clear is not None:
            clear()


_T = TypeVar("_T")


class Meeting:
    """All ranks call the same of its methods in the same order.

    Args:
        group: of all ranks, that nothing else uses meanwhile; None for one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all(self, value: _T) -> list[_T]:
        """What each rank says."""
        if self.group is None:
            return [value]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def gather(self, value: _T) -> list[_T]:
        """What each rank says, on rank 0; on the others nothing."""
        if self.group is None:
            return [value]
        said: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, said, group=self.group, group_dst=0)
        return said or []

    def first(self, make: Callable[[], _T]) -> _T:
        """What rank 0 makes, on all ranks.

        Raises:
            AutoparError: what it raised; on all ranks alike.
        """
        made: list[Any] = [None]
        if self.rank == 0:
            try:
                made = [make()]
            except AutoparError as error:
                made = [error]
        if self.group is not None:
            dist.broadcast_object_list(made, group=self.group, group_src=0)
        if isinstance(made[0], AutoparError):
            raise made[0]
        result: _T = made[0]
        return result

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Around what each rank does for itself, at whose end all know whether any has failed.

        Raises:
            AutoparError: of the first rank that has; on all ranks alike.
        """
        failure: AutoparError | None = None
        try:
            yield
        except AutoparError as error:
            failure = error
        if failed := [one for one in self.all(failure) if one is not None]:
            raise failed[0]


class World:
    """The ranks of a running job, laid out as a mesh.

    Attributes:
        mesh, rank: which of the plan's ranks this is.
        device: of this rank's tensors.
        device_mesh: torch's, with dims ``pp, dp_replicate, dp_shard, cp, tp``.
        expert_mesh: the same ranks with dims ``pp, ep_outer, ep_data, cp, tp``; None where no data ranks are borrowed.
        meshes: for :func:`autopar.ops.collectives.on_meshes`.

    Args:
        collective_timeout_s: of every collective in every group that is made here.

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
        self.coordinate = mesh.coordinate(self.rank)
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
        # emitted programs have no operators in place, which alone could do harm to a view
        warnings.filterwarnings("ignore", ".*FSDP(Block|Stage)Module.*returned a view tensor", UserWarning)
        self._timeout = timedelta(seconds=collective_timeout_s)
        for dims in self.meshes:
            for made in dims.get_all_groups():
                self._limit(made)
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        self._host_group: dist.ProcessGroup | None = None

    def check_job(self) -> None:
        """Nothing, while the job goes on that this was made in.

        Raises:
            RuntimeMismatchError: its process group was ended; its own groups, which have numbers for names, are gone or those of
                another job.
        """
        if self.mesh.world_size > 1 and dist.group.WORLD is not self._job:
            raise RuntimeMismatchError(
                "The process group that the parallel model was made in has ended"
                + (", and another one has begun" if dist.is_initialized() else ""),
                fix="Call save(...) before destroy_process_group(), and parallelize(...) and load(...) after init_process_group()",
            )

    @property
    def data_index(self) -> int:
        """Which part of the global batch this rank takes."""
        return self.mesh.data_index(self.rank)

    def axis_group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """The group of ranks that differ from this one on ``axes`` alone; None when that is this rank alone.

        All ranks call this with the same axes in the same order.
        """
        wanted = tuple(axes)
        cut, _, _ = self.mesh.cut(wanted)
        real = tuple(axis for axis in cut if axis in wanted and getattr(self.mesh, axis) > 1)
        if not real:
            return None
        if len(real) == 1 and real[0] in MESH_AXES:
            return self.device_mesh.get_group(real[0])
        return self.partition_group(self.mesh.groups(real))

    def stage_group(self, pp_ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of ranks at ``pp_ranks`` of the pipeline, the rest of the coordinate as here.

        All ranks call this, those of other pipeline ranks too: they get None.
        """
        if len(set(pp_ranks)) < 2:
            return None
        chains = self.mesh.groups(("pp",))
        chosen = tuple(tuple(chain[i] for i in sorted(set(pp_ranks))) for chain in chains)
        return self.partition_group(chosen)

    def meeting_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks for what they call outside of steps, on the host; None for one rank alone. All ranks call this.

        Of gloo, whatever the job has, and one of its own: a backend pairs what ranks call in one group by its order alone, and
        would take such a call on one rank for the collective of a step on another, so that both went on with each other's
        numbers. On the host nothing waits for a device, and no memory of it is taken.
        """
        return self._beside(self._timeout)

    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """Likewise for checkpoints, where ranks wait for each other as long as disks take."""
        return self._beside(max(self._timeout, DISKS))

    def sums_group(self) -> dist.ProcessGroup | None:
        """Likewise for sums of tensors on the devices (a norm of all gradients), apart from all groups of steps."""
        return None if self.mesh.world_size == 1 else dist.new_group(timeout=self._timeout)

    def host_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks for what a step compares on the host; None for one rank alone. All ranks call this.

        That of the job, where it is one of the host's; else one that is made once.
        """
        if self.mesh.world_size > 1 and dist.get_backend() in {dist.Backend.GLOO, FAKE}:
            return self._job
        if self._host_group is None:
            self._host_group = self.meeting_group()
        return self._host_group

    def host_threads(self) -> int | None:
        """This rank's share of the cores of its host; None on CPUs, where ranks compute on them. All ranks call this."""
        if self.device.type != "cuda":
            return None
        own, group = socket.gethostname(), self.host_group()
        here = self.mesh.world_size if dist.get_backend() == FAKE else Meeting(group).all(own).count(own)
        return max(num_cores() // here, 1)

    def _beside(self, timeout: timedelta) -> dist.ProcessGroup | None:
        if self.mesh.world_size == 1:
            return None
        backend = None if dist.get_backend() == FAKE else dist.Backend.GLOO
        made: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
        return made

    def _limit(self, group: dist.ProcessGroup) -> None:
        """Gives a group that torch has made for a mesh the timeout of the others; that of the job keeps its own."""
        if group is not dist.group.WORLD and dist.get_backend(group) != FAKE:
            backend = group._get_backend(torch.device(self.device.type))
            backend._set_default_timeout(self._timeout)

    def partition_group(self, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """This rank's group of several disjoint ones, made once; None for a rank in none of them."""
        if groups == (tuple(range(self.mesh.world_size)),):
            return dist.group.WORLD
        if groups not in self._groups:
            made = [dist.new_group(list(group), timeout=self._timeout) for group in groups]
            self._groups[groups] = next((g for ranks, g in zip(groups, made, strict=True) if self.rank in ranks), None)
        return self._groups[groups]
