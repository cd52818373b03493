"""The job that this process is one rank of: started by torchrun, meeting the others, the device of each, checks that all can work.

**Starts anew.** Launchers that start ranks anew after a failure (``torchrun --max-restarts``, or with other nodes) keep the store, and in it the
addresses of processes that are gone: torch's process groups would connect to those. Each rank says hello by a name of its own process,
rank 0 offers a place to those whose names it has read, and all who find their name in the offer meet there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from autopar.errors import RankFailedError, RuntimeMismatchError, UsageError
from autopar.hardware.describe import shipped_profile_name
from autopar.plan.plan import Plan, RankGroup

_POLL_S = 0.02


def fresh(store: Store, rank: int, size: int, *, timeout_s: float) -> Store:
    """The place that all ranks of this start get, and none of another start; all ranks call it.

    Raises:
        RankFailedError: some rank has not come after ``timeout_s``.
    """
    if size == 1:
        return store
    own, end = uuid4().hex, time.monotonic() + timeout_s
    store.set(f"hello/{rank}", own)
    if rank == 0:
        _offer(store, own, size, end)
        return PrefixStore(own, store)
    while True:
        offer = store.get("offer").decode().split() if store.check(["offer"]) else []
        if len(offer) > rank and offer[rank] == own:
            store.set(f"{offer[0]}/{rank}", "")
            return PrefixStore(offer[0], store)
        _wait(end, "Rank 0")


def _offer(store: Store, own: str, size: int, end: float) -> None:
    """Until every rank has found its name in the offer; names of an earlier start are read until they are replaced."""
    hellos, answers = ([f"{place}/{rank}" for rank in range(1, size)] for place in ("hello", own))
    offered: Sequence[bytes] = ()
    while not store.check(answers):
        if store.check(hellos):
            found = store.multi_get(hellos)
            if found != offered:
                store.set("offer", " ".join([own, *(name.decode() for name in found)]))
                offered = found
        _wait(end, "Some rank")


def _wait(end: float, who: str) -> None:
    if time.monotonic() > end:
        raise RankFailedError(
            f"{who} did not come to the start of the job",
            fix="See what the launcher says of it, and start the job again",
        )
    time.sleep(_POLL_S)


DEFAULT_TIMEOUT_S = 600.0

FAKE = "fake"
"""The backend of one rank of a larger job, whose other ranks are nowhere, and which has no store to tell them by."""

_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE")
"""Where srun, Open MPI, MPICH and Intel MPI, MVAPICH and Flux tell a process of how many it is one. Not ``SLURM_NTASKS``, which a
batch script has too that runs once."""

_HOST = ("gloo", "mpi")
"""Backends that are given tensors of a GPU by way of the host, if they take them at all."""


def start(device_type: str, *, collective_timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Makes the default process group unless there is one.

    That of torchrun, or of another launcher that tells torch of its ranks as torchrun does; where nobody has, a world of one
    rank. What is started here is ended at exit. On GPUs communicators are made at once, for this rank's device: one that is made
    by its first collective, in the middle of a step, waits there for ranks that are elsewhere, and takes memory when all is taken.

    Returns:
        Whether nobody said how many ranks there are.

    Raises:
        RuntimeMismatchError: a launcher told torch of ranks, but not all that it takes to meet them; there is no GPU for this rank,
            or two ranks have the same; the process group that is there cannot carry tensors of ``device_type``.
    """
    if device_type == "cuda":
        torch.cuda.set_device(local_device(device_type))
    if dist.is_initialized():
        check_backend(device_type, dist.get_backend_config())
        return False
    timeout, is_alone = timedelta(seconds=collective_timeout_s), False
    store: Store
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        is_alone = "variable RANK " in str(error)  # the first that torch looks for
        if not is_alone:
            raise RuntimeMismatchError(
                "The launcher has set only some of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                got=str(error).rpartition(": ")[2],
                fix="Start the ranks with torchrun, or set the missing one on each of them",
            ) from error
        store, rank, size = HashStore(), 0, 1
    store, device = fresh(PrefixStore("autopar", store), rank, size, timeout_s=collective_timeout_s), None
    backend = "gloo"
    if device_type == "cuda":
        backend, device = "nccl", local_device(device_type)
        check_devices(store, rank, size, _identity(device))
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout, device_id=device
    )
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
                f"The launcher started {value} processes ({name}={value}), but RANK and WORLD_SIZE are not set",
                fix=f"{how_to_start(value)}. Where each is to train alone, name a cluster of one device",
            )


PLAN = "AUTOPAR_PLAN"
"""By this variable ``autopar run`` tells each rank which plan's file it was started for."""


def given_plan(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The plan's file that ``autopar run`` started this rank for; None where something else did."""
    value = environment.get(PLAN, "")
    return Path(value) if value else None


def how_to_start(num_ranks: int | str) -> str:
    """What to do so that a job has as many ranks."""
    return (
        f"Start {num_ranks} ranks with torchrun (another launcher has to set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and "
        "LOCAL_RANK)"
    )


def stop() -> None:
    """Ends the default process group if it is still there."""
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device_type(cluster: str) -> str:
    """``cuda`` where there is one, unless the plan is for CPUs."""
    return "cuda" if torch.cuda.is_available() and not cluster.startswith("cpu") else "cpu"


def local_device(device_type: str) -> torch.device:
    """The device of this rank: its node's CPU, or a GPU of its node.

    Where the launcher does not say which rank of the node this is: the GPU that was chosen (``torch.cuda.set_device``), else the
    first one.

    Raises:
        RuntimeMismatchError: the node shows this process fewer GPUs than it takes.
    """
    if device_type != "cuda":
        return torch.device(device_type)
    number = dist.get_node_local_rank(fallback_rank=torch.cuda.current_device())
    return torch.device("cuda", device_index(number, torch.cuda.device_count()))


def device_index(local_rank: int, count: int) -> int:
    """Which of the GPUs that a process sees is its own.

    The one of its number on the node; the only one, where the launcher shows each process none but its own (SLURM with
    ``--gpus-per-task=1``, Kubernetes with a pod a rank, CUDA_VISIBLE_DEVICES of each).

    Args:
        local_rank: the process's number on the node.
        count: of the GPUs that it sees.

    Raises:
        RuntimeMismatchError: it sees several, and none of its number.

    >>> device_index(3, 8), device_index(3, 1)
    (3, 0)
    """
    if count == 1 or 0 <= local_rank < count:
        return 0 if count == 1 else local_rank
    raise RuntimeMismatchError(
        f"The process with LOCAL_RANK={local_rank} sees only {count} GPUs",
        fix="Start as many ranks on a node as it has GPUs, or show each rank one (CUDA_VISIBLE_DEVICES)",
    )


def check_devices(store: Store, rank: int, size: int, identity: str) -> None:
    """Refuse a job in which two ranks would compute on one GPU: NCCL would hang, or name neither.

    All ranks call this once, before they have a process group; all raise the same.

    Args:
        store: of the job.
        identity: of this rank's GPU, which no other in the job has.

    Raises:
        RuntimeMismatchError: names the two ranks.
    """
    store = PrefixStore("devices", store)
    first = store.compare_set(identity, "", str(rank)).decode()
    if first != str(rank):
        store.compare_set("twice", "", f"ranks {first} and {rank} on {identity}")
    if store.add("arrived", 1) == size:
        store.set("all", "")
    store.wait(["all"])
    if store.check(["twice"]):
        raise RuntimeMismatchError(
            "Two ranks have the same GPU",
            got=store.get("twice").decode(),
            fix="Start no more ranks on a node than it has GPUs, and let the launcher set LOCAL_RANK (torchrun does)",
        )


def _identity(device: torch.device) -> str:
    return (
        f"{socket.gethostname()}, {torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).uuid}"
    )


def own_store(name: str, rank: int) -> Store:
    """The job's store, by a connection of its own, under names that no other of this ``name`` has.

    Ranks make theirs in the same order, so that counting each rank's own gives all the same number.
    """
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"autopar/{name}s/{rank}", 1)
    return PrefixStore(f"autopar/{name}/{number}", store.clone())  # type: ignore[attr-defined]


def check_backend(device_type: str, config: str) -> None:
    """Refuse a process group that cannot carry a plan's tensors.

    Args:
        config: as ``torch.distributed.get_backend_config`` gives it, ``"cpu:gloo,cuda:nccl"``.

    Raises:
        RuntimeMismatchError: it has no backend for ``device_type``, or has one for CPUs on GPUs.

    >>> check_backend("cuda", "cpu:gloo,cuda:nccl")
    """
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    found = backends.get(device_type)
    if found is None or (device_type == "cuda" and found in _HOST):
        wanted = "nccl" if device_type == "cuda" else "gloo"
        raise RuntimeMismatchError(
            f"The process group that is there cannot carry tensors on {device_type}"
            + (f" (its backend is {found})" if found else f" (its backends are {config})"),
            fix=f'Call init_process_group("{wanted}"), leave it to autopar, or search a plan for the devices of that group',
        )


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
                f"Ranks {group.start} to {group.stop - 1} are not on the devices of the plan",
                expected=group.device,
                got=", ".join(found),
                fix="Number the nodes in the order of the plan's groups (torchrun --node-rank)",
            )


def start_script(plan: Plan, file: Path, script: Sequence[str], **options: Any) -> int:
    """Run a script on this machine's share of a plan's ranks, and wait for its end.

    Args:
        plan: says how many ranks there are.
        file: of the plan, which :func:`autopar.runtime.job.given_plan` gives each rank.
        script: and its arguments.
        options: of :func:`command`.

    Returns:
        The exit code of torchrun. SIGTERM is passed on to it, and by it to the ranks.

    Raises:
        UsageError: as :func:`command`; there is no such script.
    """
    if not Path(script[0]).is_file():
        raise UsageError.missing(f"script {script[0]}", fix="Give the path of a Python file")
    ranks = command(plan, script, **options)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, PLAN: str(file.resolve())}
    with subprocess.Popen(ranks, env=environment) as job, on_sigterm(job.terminate):
        while True:
            try:
                return job.wait()
            except KeyboardInterrupt:  # of the whole terminal: torchrun ends its ranks, and then itself
                continue


@contextmanager
def on_sigterm(act: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGTERM does this and nothing else; Python lets its main thread alone decide about signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(
    plan: Plan, script: Sequence[str], *, nodes: int = 1, rendezvous: str | None = None, max_restarts: int = 0
) -> list[str]:
    """What starts the ranks of one machine.

    Args:
        script: and its arguments.
        nodes: machines, on each of which this is called.
        rendezvous: ``HOST:PORT`` of one of them.
        max_restarts: how often all ranks are started anew after one has failed.

    Raises:
        UsageError: the ranks do not divide among the machines, or these have no place to meet.
    """
    ranks = plan.mesh.world_size
    if ranks % nodes:
        raise UsageError(
            f"{ranks} ranks do not divide among {nodes} machines",
            fix="Give a number of nodes that divides the plan's ranks",
        )
    if (nodes > 1) != (rendezvous is not None):
        raise UsageError(
            f"{nodes} machines need a place to meet" if nodes > 1 else "One machine alone meets nobody",
            fix="Give --nodes and --rendezvous HOST:PORT together",
        )
    again = [f"--max-restarts={max_restarts}"] if max_restarts else []
    place = ["--standalone"]
    if rendezvous is not None:
        place = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=autopar"]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *place,
        f"--nproc-per-node={ranks // nodes}",
        *again,
        *script,
    ]
