"""From a model and a plan to a running job: rank 0 makes the plan, all ranks receive it, and each builds its part."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

from autopar.errors import AutoparError, RankFailedError, first_line, whole
from autopar.graph.graph import Graph
from autopar.lower.check_sums import check_program
from autopar.lower.program import lower
from autopar.plan.check import check_model, check_plan
from autopar.plan.plan import Plan
from autopar.plan.run_log import FILE_NAME
from autopar.runtime.failure_watch import Alarm, ordinary
from autopar.runtime.job import DEFAULT_TIMEOUT_S, check_groups, own_store, start
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.same_values import checksums, differing
from autopar.runtime.weights import FileWeights, ModelWeights
from autopar.runtime.world import Peers, World
from autopar.util.files import check_places, check_writable

Make = Callable[[], tuple[Plan, Graph]]
"""Returns the plan and the traced model that it is for."""

logger = logging.getLogger("autopar")
_MADE, _POLL_S = "made", 0.2
_MARK = "_autopar_trained"


def launch(
    model: nn.Module,
    make: Make,
    *,
    device_type: str,
    weights: str | Path | None = None,
    seed: int = 0,
    collective_timeout_s: float = DEFAULT_TIMEOUT_S,
    log_dir: str | Path | None = None,
) -> ParallelModel:
    """Make this rank's part of ``model``; all ranks of the job call it.

    Args:
        model: with weights (those of rank 0 are used) or on meta.
        make: called on rank 0 only; all ranks receive its plan and graph.
        device_type: ``cuda`` (NCCL) or ``cpu`` (gloo).
        weights: folder of safetensors files, which replace the model's parameters and persistent buffers.
        seed: of random operators, and of the initialisation of a model on meta.
        collective_timeout_s: timeout of every collective, in seconds.
        log_dir: see :class:`ParallelModel`.

    Raises:
        AutoparError: on every rank what ``make`` raised on rank 0. If that is another kind of error rank 0 raises it unchanged, and the
            others quote it.
        UsageError: a place is no path, the log cannot be written, or the seed is no whole number.
        RuntimeMismatchError: the job has another size than the plan's mesh, or its nodes another order than the plan's groups.
        PlanError: the plan is for another model.
        RankFailedError: another rank failed to build its part.
        InternalError: some gradient would lack its sum over ranks, or be summed although it is complete.
    """
    places = {"weights": weights, "log_dir": log_dir}
    check_places(**{name: place for name, place in places.items() if place is not None})
    seed = whole("seed", seed)
    start(device_type, collective_timeout_s=collective_timeout_s)
    with ordinary():
        plan, graph = _from_first_rank(partial(_made, make, log_dir))
        alarm = Alarm(dist.get_rank(), dist.get_world_size())
        with closing(alarm), alarm.watched("parallelize"):
            alarm.runs()
            check_plan(plan)
            check_model(plan, graph.name, graph.fingerprint)
            world = World(plan.mesh, device_type, collective_timeout_s=collective_timeout_s)
            if plan.groups and device_type == "cuda":
                check_groups(plan.groups, Peers(dist.group.WORLD).all_gather(torch.cuda.get_device_name(world.device)))
            program = lower(plan, graph, device=world.device, rank=world.rank)
            check_program(program)
            # GPUs of different kinds draw different numbers: ranks on several kinds draw on their hosts
            drawn_on = torch.device("cpu") if plan.groups else world.device
            if weights is not None:
                source: ModelWeights = FileWeights(weights, model, seed, drawn_on)
            else:
                source = ModelWeights(model, seed, drawn_on)
                take_first_rank_weights(model, world.device)
            folder = None if log_dir is None else Path(log_dir)
            parallel = ParallelModel(program, world, source, seed=seed, log_dir=folder)
    _mark(model, parallel)
    return parallel


@dataclass(frozen=True, slots=True)
class _Trained:
    """A mark on a module: the model that it was last a part of, and what trains its copy; copies and pickles of the module have none."""

    model: weakref.ref[nn.Module]
    parallel: weakref.ref[ParallelModel]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def _mark(model: nn.Module, parallel: ParallelModel) -> None:
    """Mark the modules whose parameters ``parallel`` trains, and warn of those that another model shares with this one."""
    mark, shared = _Trained(weakref.ref(model), weakref.ref(parallel)), list[str]()
    for path, module in model.named_modules():
        trained = [name for name, p in module.named_parameters(path, recurse=False) if p.requires_grad]
        if not trained:
            continue
        other = module.__dict__.get(_MARK)
        if other is not None and other.parallel() is not None and other.model() is not model:
            shared += trained
        module.__dict__[_MARK] = mark
    if shared and dist.get_rank() == 0:
        logger.warning(
            "%d parameters of this model, such as %s, are in another parallel model too, which trains a copy of them: neither sees the steps "
            "of the other. Compute both losses in one module to train them together.",
            len(shared),
            shared[0],
        )


def _made(make: Make, log_dir: str | Path | None) -> tuple[Plan, Graph]:
    """Return the result of ``make``, which may take long, once a log can be written."""
    if log_dir is not None:
        check_writable(Path(log_dir) / FILE_NAME, make_folder=True)
    return make()


def _from_first_rank(make: Make) -> tuple[Plan, Graph]:
    """Return the result of ``make`` on rank 0, on every rank; its errors are raised there too.

    Collectives have a timeout, and a search takes as long as it may: the other ranks poll the job's store until rank 0 is done.
    """
    if dist.get_world_size() == 1:
        return make()
    store, unexpected = own_store("plan", dist.get_rank()), list[Exception]()

    def answer() -> tuple[Plan, Graph]:
        try:
            return make()
        except AutoparError:
            raise
        except Exception as error:
            unexpected.append(error)
            raise AutoparError(
                "Rank 0 failed to make the plan",
                got=f"{type(error).__name__}: {first_line(error)}",
                fix="See the traceback of rank 0",
            ) from error
        finally:
            store.set(_MADE, "")

    if dist.get_rank() != 0:
        _wait_for(store)
    try:
        return Peers(dist.group.WORLD).from_first_rank(answer)
    except AutoparError:
        if unexpected:
            raise unexpected[0] from unexpected[0].__cause__
        raise


def _wait_for(store: Store) -> None:
    """Wait until rank 0 has called ``make``.

    Raises:
        RankFailedError: the store has ended, which without a launcher is in rank 0's process.
    """
    try:
        while not store.check([_MADE]):
            time.sleep(_POLL_S)
    except dist.DistError as error:
        raise RankFailedError(
            "Rank 0 ended before it had a plan",
            got=first_line(error),
            fix="See what rank 0 reports, and start the job again",
        ) from error


def take_first_rank_weights(model: nn.Module, device: torch.device) -> None:
    """Make a model with real weights the same on all ranks: each tensor that differs anywhere takes rank 0's value.

    Ranks may have built their models from different random states; parts of different models do not fit together.
    """
    if dist.get_world_size() == 1:
        return
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    if not tensors:
        return
    with torch.no_grad():
        sums = torch.cat([checksums([t]).cpu() for t in tensors]).to(device)
        for tensor, differs in zip(tensors, differing(sums).tolist(), strict=True):
            if differs:
                value = tensor.detach().to(device).contiguous()
                dist.broadcast(value, src=0)
                tensor.copy_(value)
