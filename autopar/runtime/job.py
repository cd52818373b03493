"""The job of which this process is one rank: its start by torchrun, its process group and devices, and checks of both.

**Restarts.** Launchers that restart ranks after a failure (``torchrun --max-restarts``, or on other nodes) keep the store with the
addresses of dead processes, to which torch's process groups would connect. So each rank writes a new name of its process to the store, and
rank 0 writes an offer with the names that it has read. The ranks that find their names in the offer meet under a new prefix.
"""

from __future__ import annotations

import os
import re
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

from autopar.errors import RankFailedError, RuntimeMismatchError, UsageError, check_seconds
from autopar.hardware.describe import shipped_profile_name
from autopar.plan.plan import Plan, RankGroup

_POLL_S = 0.02


def fresh(store: Store, rank: int, size: int, *, timeout_s: float) -> Store:
    """Return a store for the ranks of this start, which ranks of no other start share; all ranks call it.

    Raises:
        RankFailedError: some rank has not arrived after ``timeout_s``.
    """
    if size == 1:
        return store
    process, deadline_s = uuid4().hex, time.monotonic() + timeout_s
    store.set(f"hello/{rank}", process)
    if rank == 0:
        _offer(store, process, size, deadline_s)
        return PrefixStore(process, store)
    while True:
        offer = store.get("offer").decode().split() if store.check(["offer"]) else []
        if len(offer) > rank and offer[rank] == process:
            store.set(f"{offer[0]}/{rank}", "")
            return PrefixStore(offer[0], store)
        _wait(deadline_s, "Rank 0")


def _offer(store: Store, process: str, size: int, deadline_s: float) -> None:
    """Write offers until every rank has found its name in one; names of an earlier start are read until they are replaced."""
    hellos, answers = ([f"{place}/{rank}" for rank in range(1, size)] for place in ("hello", process))
    offered: Sequence[bytes] = ()
    while not store.check(answers):
        if store.check(hellos):
            names = store.multi_get(hellos)
            if names != offered:
                store.set("offer", " ".join([process, *(name.decode() for name in names)]))
                offered = names
        _wait(deadline_s, "Some rank")


def _wait(deadline_s: float, who: str) -> None:
    if time.monotonic() > deadline_s:
        raise RankFailedError(
            f"{who} did not come to the start of the job",
            fix="See what the launcher says of it, and start the job again",
        )
    time.sleep(_POLL_S)


DEFAULT_TIMEOUT_S = 600.0

FAKE = "fake"
"""The backend of a single rank of a larger job whose other ranks do not exist; it has no store."""

_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE")
"""Variables by which srun, Open MPI, MPICH and Intel MPI, MVAPICH and Flux give the number of processes.

``SLURM_NTASKS`` is not among them, as it is also set in a batch script that runs once."""

_HOST = ("gloo", "mpi")
"""Backends that move tensors of a GPU through the host, if they accept them at all."""


def start(device_type: str, *, collective_timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Make the default process group unless there is one.

    It is that of torchrun, or of another launcher that sets torch's variables; without these it is a world of one rank. A group made here
    ends at exit. On GPUs communicators are made at once, for this rank's device. One that is made by its first collective, in the middle of
    a step, would wait there for other ranks, and need memory when none is left.

    Returns:
        Whether no launcher gave the number of ranks.

    Raises:
        UsageError: the timeout is no number of seconds.
        RuntimeMismatchError: a launcher has set only some of torch's variables; there is no GPU for this rank, or two ranks have the same;
            the existing process group cannot carry tensors of ``device_type``.
    """
    check_seconds(least=0.001, collective_timeout_s=collective_timeout_s)
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
    # finalizers run in reverse order of creation: alarms still have a connection when they inform other ranks
    weakref.finalize(dist, stop)
    return is_alone


def check_alone(environment: Mapping[str, str] = os.environ) -> None:
    """Check that no launcher unknown to torch has started this process as one of several.

    A launcher gives its numbers only in the environment: as torch reads those of torchrun for :func:`start`, this reads those of others. No
    plan or number depends on it.

    Raises:
        RuntimeMismatchError: one has; each process would silently train by itself.
    """
    for name in _COUNTS:
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > 1:
            raise RuntimeMismatchError(
                f"The launcher started {value} processes ({name}={value}), but RANK and WORLD_SIZE are not set",
                fix=f"{how_to_start(value)}. Where each is to train alone, name a cluster of one device",
            )


PLAN = "AUTOPAR_PLAN"
"""The variable by which ``autopar run`` gives each rank the path of its plan's file."""


def given_plan() -> Path | None:
    """Return the path of the plan's file for which ``autopar run`` started this rank; None if something else did."""
    value = os.environ.get(PLAN, "")
    return Path(value) if value else None


def how_to_start(num_ranks: int | str) -> str:
    """Return how to start a job with so many ranks."""
    return (
        f"Start {num_ranks} ranks with torchrun (another launcher has to set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and "
        "LOCAL_RANK)"
    )


def stop() -> None:
    """End the default process group if it still exists."""
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device_type(cluster: str) -> str:
    """``cuda`` if it is available, unless the plan is for CPUs."""
    return "cuda" if torch.cuda.is_available() and not cluster.startswith("cpu") else "cpu"


def local_device(device_type: str) -> torch.device:
    """Return the device of this rank: its node's CPU, or a GPU of its node.

    If the launcher does not give the rank's number on the node, it is the GPU of ``torch.cuda.set_device``, by default the first.

    Raises:
        RuntimeMismatchError: the node shows this process too few GPUs.
    """
    if device_type != "cuda":
        return torch.device(device_type)
    number = dist.get_node_local_rank(fallback_rank=torch.cuda.current_device())
    return torch.device("cuda", device_index(number, torch.cuda.device_count()))


def device_index(local_rank: int, count: int) -> int:
    """Return the index of a process's GPU among those that it sees.

    It is the process's number on the node, or 0 if the launcher shows each process only its own GPU (SLURM with ``--gpus-per-task=1``,
    Kubernetes with a pod for each rank, different CUDA_VISIBLE_DEVICES).

    Args:
        local_rank: the process's number on the node.
        count: the number of GPUs that it sees.

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
    """Refuse a job in which two ranks would compute on one GPU: NCCL would hang, or raise an error that names neither.

    All ranks call this once, before they have a process group; all raise the same error.

    Args:
        store: the job's store.
        identity: a text that identifies this rank's GPU in the job.

    Raises:
        RuntimeMismatchError: two ranks have the same GPU; names them.
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
    """Return the job's store, over a new connection, with a prefix that no other store of this ``name`` has.

    Ranks make theirs in the same order, so that each rank's count of its own gives the same number.
    """
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"autopar/{name}s/{rank}", 1)
    return PrefixStore(f"autopar/{name}/{number}", store.clone())  # type: ignore[attr-defined]


def check_backend(device_type: str, config: str) -> None:
    """Refuse a process group that cannot carry the tensors of a plan.

    Args:
        config: as ``torch.distributed.get_backend_config`` gives it, ``"cpu:gloo,cuda:nccl"``.

    Raises:
        RuntimeMismatchError: it has no backend for ``device_type``, or one for CPUs on GPUs.

    >>> check_backend("cuda", "cpu:gloo,cuda:nccl")
    """
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    backend = backends.get(device_type)
    if backend is None or (device_type == "cuda" and backend in _HOST):
        wanted = "nccl" if device_type == "cuda" else "gloo"
        raise RuntimeMismatchError(
            f"The process group that is there cannot carry tensors on {device_type}"
            + (f" (its backend is {backend})" if backend else f" (its backends are {config})"),
            fix=f'Call init_process_group("{wanted}"), leave it to autopar, or search a plan for the devices of that group',
        )


def check_groups(groups: Sequence[RankGroup], names: Sequence[str]) -> None:
    """Refuse a job whose nodes are not numbered as in the plan.

    Args:
        groups: groups of ranks, each on equal devices.
        names: the name of each rank's device, as its driver gives it.

    Raises:
        RuntimeMismatchError: a group has different devices, or those of another group.
    """
    planned = {group.device for group in groups}
    for group in groups:
        devices = sorted(set(names[group.start : group.stop]))
        profile = shipped_profile_name(devices[0])
        if len(devices) > 1 or (profile in planned and profile != group.device):
            raise RuntimeMismatchError(
                f"Ranks {group.start} to {group.stop - 1} are not on the devices of the plan",
                expected=group.device,
                got=", ".join(devices),
                fix="Number the nodes in the order of the plan's groups (torchrun --node-rank)",
            )


def start_script(plan: Plan, file: Path, script: Sequence[str], **options: Any) -> int:
    """Run a script on this machine's share of a plan's ranks, and waits for its end.

    Args:
        plan: gives the number of ranks.
        file: the plan's file, which :func:`autopar.runtime.job.given_plan` returns on each rank.
        script: the script and its arguments.
        options: those of :func:`command`.

    Returns:
        The exit code of torchrun. SIGTERM is forwarded to torchrun, which forwards it to the ranks.

    Raises:
        UsageError: as :func:`command`, or the script does not exist.
    """
    if not Path(script[0]).is_file():
        raise UsageError.missing(f"script {script[0]}", fix="Give the path of a Python file")
    ranks = command(plan, script, **options)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, PLAN: str(file.resolve())}
    with subprocess.Popen(ranks, env=environment) as job, on_sigterm(job.terminate):
        while True:
            try:
                return job.wait()
            except KeyboardInterrupt:  # torchrun receives it too, and ends its ranks and itself
                continue


@contextmanager
def on_sigterm(act: Callable[[], object]) -> Iterator[None]:
    """Enter the context in which SIGTERM calls ``act`` only; without effect outside the main thread, where Python sets no signal handlers."""
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
    """Return the command that starts the ranks of one machine.

    Args:
        script: the script and its arguments.
        nodes: the number of machines, on each of which this is called.
        rendezvous: ``HOST:PORT`` of one of them.
        max_restarts: how often all ranks are restarted after one has failed.

    Raises:
        UsageError: the number of ranks is not divisible by that of machines, or several machines have no rendezvous of this form.
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
    if rendezvous is not None and not re.fullmatch(r".+:\d+", rendezvous):
        raise UsageError(f"'{rendezvous}' is no place to meet", fix="Write for example --rendezvous node0:29500")
    restarts = [f"--max-restarts={max_restarts}"] if max_restarts else []
    place = ["--standalone"]
    if rendezvous is not None:
        place = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=autopar"]
    per_node = f"--nproc-per-node={ranks // nodes}"
    return [sys.executable, "-m", "torch.distributed.run", *place, per_node, *restarts, *script]
