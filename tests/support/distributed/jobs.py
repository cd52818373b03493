"""What the tests run on every rank; by name, so that workers can import it."""

import gc
import logging
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, UsageError
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.plan.plan import Plan
from autopar.runtime.assemble import fsdp_modules
from autopar.runtime.failure_watch import Alarm
from autopar.runtime.launch import launch
from autopar.runtime.monitor import MEASURED_STEPS, WARM_UP_STEPS
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.same_values import EVERY
from autopar.runtime.step import local_batch
from autopar.runtime.step.gradients import local_part
from autopar.verification.reference import adamw, loss_of
from tests.support.distributed.subjects import HfSubject
from tests.support.parallel import clip, halve, on_rank, state, train_step
from tests.support.said import said

Batch = Mapping[str, Tensor]


def _alarmed(subject: HfSubject, plan: Plan, graph: Graph, path: Path) -> ParallelModel:
    """One that soon finds out what other ranks do; what is logged goes to the file."""
    logging.getLogger("autopar").addHandler(logging.FileHandler(path))
    with mock.patch("autopar.runtime.trained_module.Alarm", partial(Alarm, poll_s=0.05, grace_s=0.2)):
        return build(subject, plan, graph)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """What is refused inside is written there, and the rank stays, as if it had caught that, until the others have said so too."""
    try:
        yield
    except AutoparError as error:
        (folder / f"rank{dist.get_rank()}").write_text(str(error))
        _stay_until_said(folder)


def _stay_until_said(folder: Path, ranks: Collection[int] | None = None) -> None:
    paths = [folder / f"rank{rank}" for rank in (range(dist.get_world_size()) if ranks is None else ranks)]
    deadline = time.monotonic() + 30.0
    while not all(path.exists() and path.stat().st_size > 0 for path in paths) and time.monotonic() < deadline:
        time.sleep(0.05)


def failing(subject: HfSubject, plan: Plan, graph: Graph, batch: Batch, bad: Batch, call: str, folder: str) -> None:
    """Each rank writes what it says of a step that fails on one; that one stays alive, as if its error had been caught."""
    root, rank = Path(folder), dist.get_rank()
    parallel = _alarmed(subject, plan, graph, root / f"rank{rank}")
    parallel.train_step(batch)
    texts = []
    for given in (bad, batch):
        try:
            if call == "backward":
                loss = loss_of(parallel(**batch))
                with _failing("step.runner.BucketedSums.begin"):
                    loss.backward()
            elif call == "clip_grad_norm_":
                with _failing("trained_module.Norm.__call__"):
                    parallel.clip_grad_norm_(1.0)
            else:
                getattr(parallel, call)(given)
        except Exception as error:  # noqa: BLE001  its kind is what is looked at
            texts.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    (root / f"rank{rank}").write_text("\n".join(texts))
    _stay_until_said(root)


def calls_alone(subject: HfSubject, plan: Plan, graph: Graph, batch: Batch, call: str, folder: str) -> None:
    """Each rank writes what it says of a call that the first makes alone: while others are in a step, and of an evaluation
    also as it meets another call."""
    root, rank = Path(folder), dist.get_rank()
    parallel = _alarmed(subject, plan, graph, root / f"rank{rank}")
    alone = partial(getattr(parallel, call), batch if call == "evaluate" else 1.0)
    if call == "evaluate":
        (root / f"met{rank}").write_text(said(UsageError, parallel.full_state_dict if rank else alone))
    with _written(root):
        for step in range(4):
            if step == 2 and rank == 0:
                alone()
            parallel.train_step(batch)


def without_the_other(how: str) -> str:
    """What the first rank says of a collective that fails, as the second is not in that call: its thread does not run, or does,
    or it has made as many calls by itself and is gone."""
    rank, is_gone = dist.get_rank(), how == "gone"
    alarm = Alarm(rank, 2, poll_s=5.0 if is_gone else 0.1, grace_s=0.5 if how == "stopped" else 5.0)
    what, reason = "train_step", "[unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"
    if is_gone:
        what, reason = "evaluate", "[pair.cc:553] Connection closed by peer [127.0.0.1]:18105."
    else:
        with alarm.watched("train_step"):
            while not alarm._read(f"seen/{rank}"):
                time.sleep(0.05)
        if how == "stopped" and rank == 1:
            alarm._closed.set()
            assert alarm._thread is not None
            alarm._thread.join()
        dist.barrier()
    try:
        if rank == 0:
            with alarm.watched(what):
                alarm.runs()
                raise RuntimeError(reason)
        for _ in range(2 * is_gone):
            with alarm.watched("train_step"):
                alarm.runs()
    except AutoparError as error:
        return str(error)
    finally:
        if not is_gone:
            dist.barrier()
        alarm.close()
    return ""


def _failing(name: str) -> Any:
    """A function of the runtime fails on the last rank, as one of torch's does."""
    if dist.get_rank() == 0:
        return nullcontext()
    return mock.patch(f"autopar.runtime.{name}", side_effect=IndexError("Target 1000000 is out of bounds."))


def after_refusals(parallel: ParallelModel, batch: Batch, how: str) -> tuple[list[str], float]:
    """What is said of batches that are short, or of which each rank has another order, and the loss of a step after them."""
    bad = {name: value[:, :-1] if how == "short" else value.roll(dist.get_rank(), 0) for name, value in batch.items()}
    if how == "shuffled later":
        parallel.train_step(batch)
        parallel._shared._calls = local_batch.EVERY
    with _heard() as records:
        refusals = [said(UsageError, call, bad) for call in (parallel.train_step, parallel.evaluate)]
    texts = [*(record.getMessage() for record in records), *filter(None, refusals)]
    return texts, parallel.train_step(batch).item()


def frozen_alone(parallel: ParallelModel, batch: Batch) -> list[str]:
    """What is said in a step while the last rank has frozen a parameter, and in one after it."""
    found, parameter = list[str](), max(parallel.parameters(), key=lambda p: p.numel())
    for is_frozen in (dist.get_rank() == dist.get_world_size() - 1, False):
        parameter.requires_grad_(not is_frozen)
        found.append(said(UsageError, parallel.train_step, batch))
    return found


def failing_build(subject: HfSubject, plan: Plan, graph: Graph, folder: str) -> None:
    """The last rank cannot make its part, which the others meet in collectives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    logging.getLogger("autopar").addHandler(logging.FileHandler(Path(folder) / f"rank{rank}"))

    def lowered(*args: Any, **options: Any) -> Any:
        if rank == size - 1:
            raise LookupError("no such part")
        return lower(*args, **options)

    with (
        mock.patch("autopar.runtime.launch.Alarm", partial(Alarm, poll_s=0.05, grace_s=0.2)),
        mock.patch("autopar.runtime.launch.lower", lowered),
    ):
        try:
            launch(subject.build(), lambda: (plan, graph), device_type="cpu")
        except LookupError:
            _stay_until_said(Path(folder), range(size - 1))  # as if it had been caught; the others end before


def on_model(job: Callable[..., Any], subject: Any, plan: Plan, graph: Graph, *given: Any) -> Any:
    return job(build(subject, plan, graph), *given)


def build(subject: HfSubject, plan: Plan, graph: Graph) -> ParallelModel:
    return on_rank(subject.build(), plan, graph)


def train_beside_others(subject: Any, plan: Plan, graph: Graph, batch: Batch, num_groups: int) -> tuple[float, Any]:
    """A step's loss and gradients in a job that has as many groups already, by whose number later ones are named."""
    for _ in range(num_groups):
        dist.new_group()
    parallel = build(subject, plan, graph)
    loss = parallel.train_step(batch).item()
    return loss, parallel.full_gradients()


def parameters_left(subject: Any, plan: Plan, graph: Graph, batch: Batch) -> int:
    """How many parameters are left of a model that has trained and that nobody has any more."""

    def count() -> int:
        gc.collect()
        return sum(type(one) in (nn.Parameter, DTensor) for one in gc.get_objects())

    before = count()
    build(subject, plan, graph).train_step(batch)
    return count() - before


def num_threads() -> int:
    """How many threads this process has: autograd's, which stay, are not counted."""
    return sum("autograd" not in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def in_another_job(parallel: ParallelModel, batch: Batch, folder: str) -> list[str]:
    """What a model says whose process group was ended, and then another begun."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel.train_step(batch)
    calls = partial(parallel.train_step, batch), partial(parallel.save, f"{folder}/saved"), parallel.full_state_dict
    dist.barrier()
    dist.destroy_process_group()
    ended = [said(AutoparError, call) for call in calls]
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    return ended + [said(AutoparError, call) for call in calls]


def steps(parallel: ParallelModel, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(parallel.train_step(batch).item())
        optimizer.step()
    return losses


def train(model: nn.Module, batches: Sequence[Batch], max_norm: float | None = None) -> dict[str, Any]:
    """Losses, gradient norms before clipping, and final parameters, of ranks or of one device."""
    optimizer = adamw(model.parameters())
    losses, norms = list[float](), list[float]()
    for batch in batches:
        optimizer.zero_grad()
        losses.append(train_step(model, batch).item())
        if max_norm is not None:
            norms.append(clip(model, max_norm))
        optimizer.step()
    return {"losses": losses, "norms": norms, "parameters": state(model)}


def gradients_both_ways(parallel: ParallelModel, batch: Batch) -> dict[str, Any]:
    """Gradients of ``train_step``, of call and ``backward``, and of twice without ``zero_grad``."""
    stepped = parallel.train_step(batch)
    by_step = parallel.full_gradients()
    parallel.train_step(batch)
    twice = parallel.full_gradients()
    for parameter in parallel.parameters():
        parameter.grad = None
    called = loss_of(parallel(**batch))
    called.backward()
    by_call = parallel.full_gradients()
    with torch.no_grad():
        silent = loss_of(parallel(**batch))
    return {"losses": [stepped.item(), called.item(), silent.item()], "step": by_step, "call": by_call, "twice": twice}


def evaluated(parallel: ParallelModel, batch: Batch) -> dict[str, Any]:
    """Losses of evaluations before, between and after steps; whether these left the gradients as they were."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
    losses = [parallel.evaluate(batch).item()]
    trained = [parallel.train_step(batch).item()]
    before = parallel.full_gradients()
    losses.append(parallel.evaluate(batch).item())
    after = parallel.full_gradients()
    optimizer.step()
    trained.append(parallel.train_step(batch).item())
    losses.append(parallel.evaluate(batch).item())
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return {"losses": losses, "trained": trained, "same": same, "steps": parallel.step_count}


def refused(parallel: ParallelModel, batch: Batch, kind: str) -> str:
    """The message with which a call, torch's clipping of gradients, or a step of torch's optimizer of that name is refused."""
    if kind == "call":
        return said(AutoparError, parallel, **batch)
    if kind == "clipping":
        parallel.train_step(batch)
        return said(AutoparError, torch.nn.utils.clip_grad_norm_, [p for p in parallel.parameters() if p.ndim > 1], 1.0)
    optimizer = getattr(torch.optim, kind)(parallel.parameters())
    return said(AutoparError, optimizer.step, lambda: parallel.train_step(batch))


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""As torch asks for where ranks hold different parameters: the stages of a pipeline."""


def go_on(
    parallel: ParallelModel, batches: Sequence[Batch], source: str, target: str, by: str
) -> tuple[int, list[float]]:
    """Trains on the first batch, or goes on from other weights by what was saved in ``source``, and saves that; the step
    counter and the losses of the other batches, or of an evaluation where the optimizer is not saved.

    ``by``: ``autopar``; ``torch``, whose ``torch.distributed.checkpoint`` saves the model; ``torch with optimizer``, by which
    it saves what ``get_state_dict`` gives.
    """
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.5) if source else adamw(parallel.parameters())
    if source:
        parallel.seed = 3
        halve(parallel)
    else:
        steps(parallel, optimizer, batches[:1])
    if by == "autopar":
        if source:
            parallel.load(source, optimizer)
        parallel.save(target, optimizer)
    else:
        has_optimizer = by != "torch"
        model, states = get_state_dict(parallel, optimizer, options=FLAT) if has_optimizer else (parallel, {})
        kept = {"model": model, "optimizer": states}
        if source:
            dcp.load(kept, checkpoint_id=source)
        if source and has_optimizer:
            set_state_dict(parallel, optimizer, model_state_dict=model, optim_state_dict=states, options=FLAT)
        dcp.save(kept, checkpoint_id=target)
    done = parallel.step_count
    if by == "torch":
        return done, [parallel.evaluate(batches[0]).item()]
    return done, steps(parallel, optimizer, batches[1:])


def saves_that_fail(parallel: ParallelModel, batch: Batch, folder: str) -> dict[str, tuple[str, list[str]]]:
    """What is said of saves over a whole checkpoint, and the files that are new after each: the last rank's disk is full, the first
    one's, and each rank has a folder of its own."""
    rank, optimizer = dist.get_rank(), adamw(parallel.parameters())
    steps(parallel, optimizer, [batch])
    parallel.save(folder, optimizer)
    before, found = set(Path(folder).rglob("*")), dict[str, tuple[str, list[str]]]()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for name, full in (("last", dist.get_world_size() - 1), ("first", 0), ("folders", -1)):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        dist.barrier()
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        text = said(UsageError, parallel.save, Path(folder) / f"{rank}" if name == "folders" else folder, optimizer)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
        found[name] = text, sorted(path.name for path in set(Path(folder).rglob("*")) - before if path.is_file())
    parallel.load(folder, optimizer)
    return found


def load_of_different_checkpoints(parallel: ParallelModel, folder: str) -> tuple[str, bool]:
    """What is said where each rank loads another checkpoint, and whether parameters are as they were."""
    for path in (Path(folder) / "0", Path(folder) / "1"):
        parallel.save(path, adamw(parallel.parameters()))
        halve(parallel)  # two of the same state are the same bytes
    before = parallel.full_state_dict()
    text, after = said(AutoparError, parallel.load, Path(folder) / str(dist.get_rank())), parallel.full_state_dict()
    return text, all(torch.equal(value, after[key]) for key, value in before.items())


def empty_groups_after_load(parallel: ParallelModel, folder: str) -> list[tuple[float, float]]:
    """Rates and first rates of two groups, one of them empty on a pipeline rank, after a load and a scheduler made after it."""

    def optimizer(rate: float) -> torch.optim.Optimizer:
        first = [p for name, p in parallel.named_parameters() if ".h.0." in name]
        rest = [p for _, p in parallel.named_parameters() if all(p is not one for one in first)]
        return torch.optim.SGD([{"params": first, "lr": rate}, {"params": rest, "lr": rate / 4}])

    saved = optimizer(1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(saved, 1, 0.5)
    saved.step()
    scheduler.step()
    parallel.save(Path(folder), saved)
    loaded = optimizer(7.0)
    parallel.load(Path(folder), loaded)
    torch.optim.lr_scheduler.StepLR(loaded, 1, 0.5, last_epoch=1)
    return [(group["lr"], group["initial_lr"]) for group in loaded.param_groups]


def launched_losses(subject: HfSubject, plan: Plan, graph: Graph, batch: Batch) -> tuple[float, float]:
    """The loss from the global batch on every rank, and from each rank's own samples."""
    parallel = launch(subject.build(), lambda: (plan, graph), device_type="cpu")
    own = {name: value[parallel.samples.start : parallel.samples.stop] for name, value in batch.items()}
    return parallel.train_step(batch).item(), parallel.train_step(own).item()


def launched_from(subject: Any, plan: Plan, graph: Graph, source: str, folder: str | None = None) -> dict[str, Tensor]:
    """All parameters as a launched job has them: from rank-dependent models, from meta, from files."""
    if source == "meta":
        with torch.device("meta"):
            model = subject._model()
    else:
        model = subject.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(dist.get_rank())
    parallel = launch(model, lambda: (plan, graph), device_type="cpu", weights=folder, seed=5)
    return parallel.full_state_dict()


def launch_failure(subject: HfSubject, plan: Plan, graph: Graph) -> str:
    """The message on this rank when rank 0 cannot plan, or the plan does not fit."""

    def make() -> tuple[Plan, Graph]:
        if plan.mesh.world_size == 1:
            raise AutoparError("No plan", where="plan.json", expected="one", got=0, fix="Try again")
        if plan.mesh.tp == 4:
            raise LookupError("no such thing")
        return plan, graph

    try:
        launch(subject.build(), make, device_type="cpu")
    except (AutoparError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_on_first_rank() -> None:
    if dist.get_rank() == 0:
        raise ValueError("this rank has had enough")
    dist.barrier()


def muon_steps(parallel: ParallelModel, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Matrices after steps of Muon whose iteration is in float32 (torch's is in bfloat16)."""
    step_muon([p for p in parallel.parameters() if p.ndim == 2], parallel.train_step, batches)
    return parallel.full_state_dict()


def step_muon(matrices: list[Tensor], run: Callable[[Batch], object], batches: Sequence[Batch]) -> None:
    optimizer = torch.optim.Muon(matrices, lr=0.01, ns_steps=2)
    for batch in batches:
        optimizer.zero_grad()
        run(batch)
        method = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)
        with method, mock.patch.object(torch, "bfloat16", torch.float32):  # the dtype by name in torch 2.15
            optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw, "adafactor": torch.optim.Adafactor, "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}  # fmt: skip


def held_bytes(parallel: ParallelModel, batch: Batch, optimizer_name: str = "adamw") -> dict[str, int]:
    """Of this rank: parameters (with what FSDP keeps gathered between forward and backward), gradients, states."""
    optimizer = OPTIMIZERS[optimizer_name](parallel.parameters())
    gathered, scaler = _gathered(parallel) if parallel.plan.zero_stage < 3 else 0, parallel.grad_scaler()
    parallel.train_step(batch)
    scaler.step(optimizer)
    parameters = list(dict.fromkeys(parallel.parameters()))
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "pp_rank": parallel._world.coordinate["pp"],
        "parameters": _bytes(parameters) + gathered,
        "gradients": _bytes([p.grad for p in parameters]),
        "optimizer": _bytes([value for value in states if value.ndim > 0]),
    }


def host_bytes(parallel: ParallelModel, batch: Batch) -> dict[str, int]:
    """Of this rank: what lies on the host of parameters, gradients and states after two steps, and states on the device."""
    optimizer = adamw(parallel.parameters())
    steps(parallel, optimizer, [batch, batch])
    copies = list(parallel._local_steps._hosts.values())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "pp_rank": parallel._world.coordinate["pp"],
        "copies": _bytes([c.parameter for c in copies]) + _bytes([c._gradient for c in copies]),
        "states": _bytes([value for value in states if value.ndim > 0]),
    }


def moved_bytes(parallel: ParallelModel, batch: Batch) -> tuple[int, int, int]:
    """Of this rank: its pipeline rank, bytes that one step moved to the host and back."""
    parallel.train_step(batch)
    movers = [stage.mover for stage in parallel._assembly.stages if stage.mover is not None]
    return (
        parallel._world.coordinate["pp"], sum(m.offloaded_bytes for m in movers), sum(m.reloaded_bytes for m in movers),
    )  # fmt: skip


def _gathered(parallel: ParallelModel) -> int:
    """Bytes of the whole parameters after their gathering; experts that FSDP leaves to their ranks are not gathered."""
    total = 0
    for stage in parallel._assembly.stages:
        for module in fsdp_modules(stage):
            before = {id(parameter) for parameter in _own_parameters(module)}
            module.unshard()
            total += _bytes([parameter for parameter in _own_parameters(module) if id(parameter) not in before])
            module.reshard()
    return total


def _own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    children = [child for child in module.children() if isinstance(child, torch.fx.GraphModule)]
    return [parameter for each in (module, *children) for parameter in each.parameters(recurse=False)]


def _bytes(tensors: list[Any]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(t.numel() * t.element_size() for t in local)


def watched(subject: HfSubject, plan: Plan, graph: Graph, batch: Batch, folder: str, called: bool) -> dict[str, Any]:
    """Steps until the comparison is made; what this rank knows then."""
    before = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}
    with _heard() as records:
        parallel = on_rank(subject.build(), plan, graph, log_dir=Path(folder))
        optimizer = adamw(parallel.parameters())
        for _ in range(WARM_UP_STEPS + MEASURED_STEPS + 1):
            if called:
                loss_of(parallel(**batch)).backward()
                with torch.no_grad():  # an evaluation is no step
                    parallel(**batch)
            else:
                parallel.train_step(batch)
            optimizer.step()
            optimizer.zero_grad()
    record = parallel.monitor.record
    return {
        "measured_s": record.measured_s,
        "parts": {part.name: part.measured_s for part in record.parts},
        "bytes": record.measured_bytes,
        "warnings": [entry.getMessage() for entry in records if entry.levelno == logging.WARNING],
        "active": parallel.monitor.is_active,
        "restored": all(getattr(dist, name) is function for name, function in before.items()),
    }


def crash(path: Path, times: int) -> int:
    """Rank 0 crashes so many times before it answers."""
    if dist.get_rank() == 0:
        path.write_text(path.read_text() + "x")
        if len(path.read_text()) <= times:
            signal.raise_signal(signal.SIGABRT)
    return len(path.read_text())


def drifting(parallel: ParallelModel, batch: Batch, where: str, folder: str) -> dict[str, Any]:
    """Changes a copy on the last rank, twice, before a step that looks or a checkpoint; what was said, and all copies after it."""
    held = [h for h in parallel._assembly.held if h.replicated]
    changed, was_other = "", False
    with _heard() as records:
        for number in (1, 2):
            if where != "never" and dist.get_rank() == dist.get_world_size() - 1:
                values = local_part(held[-1].parameter).view(-1)
                before, changed = values[-1].clone(), held[-1].key
                values[-1] = torch.nextafter(before, before + 1)
                was_other = bool(values[-1] != before)
            if where == "save":
                parallel.save(folder)
            else:
                parallel.step_count = number * EVERY
                parallel.evaluate(batch)
    warnings = (record.getMessage() for record in records if record.levelno >= logging.WARNING)
    texts = [text for text in warnings if "copies of" in text]
    here = parallel._world.coordinate.items()
    copies = {
        (h.key, *(place for axis, place in here if axis not in h.replicated)): local_part(h.parameter).clone()
        for h in held
    }
    return {"said": texts, "changed": changed, "was_other": was_other, "copies": copies}


@contextmanager
def _heard() -> Iterator[list[logging.LogRecord]]:
    handler, records = logging.Handler(), list[logging.LogRecord]()
    handler.emit = records.append
    logging.getLogger("autopar").addHandler(handler)
    yield records
    logging.getLogger("autopar").removeHandler(handler)
