"""This rank's place in the mesh: device, process groups, and the checks that the job fits the plan."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug as tensor_debug

from autopar.errors import RuntimeMismatchError
from autopar.mesh import EXPERT_AXIS, EXPERT_MESH_AXES, MESH_AXES, Mesh
from autopar.plan import RankGroup
from autopar.profile.names import shipped_profile_name

DEFAULT_TIMEOUT_S = 600.0

_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE")
"""Where srun, Open MPI, MPICH and Intel MPI, MVAPICH and Flux tell a process of how many it is one. Not ``SLURM_NTASKS``, which a
batch script has too that runs once."""

_CLEARING = ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache")
"""Of ``torch.distributed.tensor.debug``: torch 2.11 to 2.13 divide one cache in two, and the first of the names changed its sense."""


def start(device_type: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Makes the default process group unless there is one.

    That of torchrun, or of another launcher that tells torch of its ranks as torchrun does; where nobody has, a world of one
    rank. What is started here is ended at exit.

    Returns:
        Whether nobody said how many ranks there are.

    Raises:
        RuntimeMismatchError: a launcher told torch of ranks, but not all that it takes to meet them.
    """
    if device_type == "cuda":
        torch.cuda.set_device(local_device(device_type))
    if dist.is_initialized():
        return False
    backend = "nccl" if device_type == "cuda" else "gloo"
    timeout, is_alone = timedelta(seconds=timeout_s), False
    try:
        dist.init_process_group(backend, timeout=timeout)
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        is_alone = "variable RANK " in str(error)  # the first that torch looks for
        if not is_alone:
            raise RuntimeMismatchError(
                "a launcher of several ranks tells torch all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                value=str(error).rpartition(": ")[2],
                remedy="start the ranks with torchrun, or set the missing one on each of them",
            ) from error
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    # at exit those go first that were made later: alarms tell others while they are connected
    weakref.finalize(dist, stop)
    return is_alone


def check_alone(environment: Mapping[str, str] = os.environ) -> None:
    """Nothing, where no launcher has started this process as one of several, of which torch knows nothing.

    What a launcher says stands in the environment alone: torch reads that of torchrun for :func:`start`, at the same place and
    for the same purpose this reads that of the others. No plan or number depends on it.

    Raises:
        RuntimeMismatchError: one has: each would train by itself, and nothing would say so.
    """
    for name in _COUNTS:
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > 1:
            raise RuntimeMismatchError(
                f"a launcher that starts {value} processes tells torch of them",
                value=f"{name}={value} without RANK and WORLD_SIZE",
                remedy=f"{how_to_start(value)}; where each is to train by itself, name the cluster of one",
            )


def how_to_start(num_ranks: int | str) -> str:
    """What to do so that a job has as many ranks."""
    return (
        f"start {num_ranks} ranks with torchrun (another launcher: set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK "
        "as torchrun does, or call torch.distributed.init_process_group before)"
    )


def stop() -> None:
    """Ends the default process group if it is still there."""
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device_type(cluster: str) -> str:
    """``cuda`` where there is one, unless the plan is for CPUs."""
    return "cuda" if torch.cuda.is_available() and not cluster.startswith("cpu") else "cpu"


def local_device(device_type: str) -> torch.device:
    """The device of this rank: its node's CPU, or the GPU of its number on the node.

    Where the launcher does not say the number: the GPU that was chosen (``torch.cuda.set_device``), else the first one.
    """
    if device_type != "cuda":
        return torch.device(device_type)
    return torch.device("cuda", dist.get_node_local_rank(fallback_rank=torch.cuda.current_device()))


def check_groups(groups: Sequence[RankGroup], names: Sequence[str]) -> None:
    """Refuse a job whose nodes are not numbered as the plan counts them.

    Args:
        groups: of ranks, each on equal devices.
        names: of each rank's device, as its driver gives it.

    Raises:
        RuntimeMismatchError: a group has several devices, or those of another group.
    """
    planned = {group.device for group in groups}
    for group in groups:
        found = sorted(set(names[group.start : group.stop]))
        known = shipped_profile_name(found[0])
        if len(found) > 1 or (known in planned and known != group.device):
            raise RuntimeMismatchError(
                f"ranks {group.start} to {group.stop - 1} are on {group.device}",
                value=", ".join(found),
                remedy="number the nodes in the order of the plan's groups (torchrun --node-rank)",
            )


def _forget_meshes() -> None:
    """Clears what DTensor remembers of operators: its results hold the mesh that they were first asked for.

    Meshes are equal whose ranks are laid out alike, whatever job they are of. In a process that ended a job and began another
    a result of the new one would have groups of the old, whose names are unknown now, or those of other ranks.
    """
    for name in _CLEARING:
        clear = getattr(tensor_debug, name, None)
        if clear is not None:
            clear()


class World:
    """The ranks of a running job, laid out as a mesh.

    Attributes:
        mesh, rank: which of the plan's ranks this is.
        device: of this rank's tensors.
        device_mesh: torch's, with dims ``pp, dp_replicate, dp_shard, cp, tp``.
        expert_mesh: the same ranks with dims ``pp, ep_outer, ep_data, cp, tp``; None where no data ranks are borrowed.
        meshes: for :func:`autopar.ops.on_meshes`.

    Raises:
        RuntimeMismatchError: the job has another number of ranks than the mesh.
    """

    def __init__(self, mesh: Mesh, device_type: str) -> None:
        if dist.get_world_size() != mesh.world_size:
            raise RuntimeMismatchError(
                f"the job has as many ranks as the plan's mesh ({mesh}: {mesh.world_size})",
                value=dist.get_world_size(),
                remedy=f"{how_to_start(mesh.world_size)}, or search a plan for {dist.get_world_size()}",
            )
        _forget_meshes()
        self.mesh, self.rank = mesh, dist.get_rank()
        self._job = dist.group.WORLD
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
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def check_job(self) -> None:
        """Nothing, while the job goes on that this was made in.

        Raises:
            RuntimeMismatchError: its process group was ended; its own groups, which have numbers for names, are gone or those of
                another job.
        """
        if self.mesh.world_size > 1 and dist.group.WORLD is not self._job:
            raise RuntimeMismatchError(
                "a parallel model lives as long as the process group that it was made in",
                value="that was ended" + (", and another one begun" if dist.is_initialized() else ""),
                remedy="save(...) before destroy_process_group(); after init_process_group() parallelize(...) anew, and load(...)",
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
        """The group of all ranks for what they call outside of steps; None for one rank alone. All ranks call this.

        With gloo one of its own: it pairs what ranks call in one group by its order alone, and would take such a call on one
        rank for the collective of a step on another, so that both went on with each other's numbers. With NCCL that of the
        job: another communicator takes memory of the device, of which plans do not know.
        """
        if self.mesh.world_size == 1:
            return None
        return dist.new_group() if dist.get_backend() == dist.Backend.GLOO else dist.group.WORLD

    def partition_group(self, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """This rank's group of several disjoint ones, made once; None for a rank in none of them."""
        mine = next((group for group in groups if self.rank in group), None)
        if groups == (tuple(range(self.mesh.world_size)),):
            return dist.group.WORLD
        if groups not in self._groups:
            made = [dist.new_group(list(group)) for group in groups]
            own = next((g for ranks, g in zip(groups, made, strict=True) if ranks == mine), made[0])
            self._groups[groups] = own
        return self._groups[groups] if mine is not None else None
