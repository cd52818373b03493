"""Runs cases among fakes, and writes what it saw: ``python -m tools.fakes.driver GUARD OUTPUT NAME...``; see :func:`runs`."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from autopar.plan.plan import PrecisionName
from tools.fakes.cases import LOADS, Case, runs

BATCH = 4

PROBE = "probe"
"""In place of a case: shows that faults are seen."""


def run(case: Case, rank: int, record: Any) -> int:
    """Builds the rank's part of a plan and does what a training script does.

    What is seen in the last of the steps is that of a step; the first ones make what is kept.

    Returns:
        How many micro-batches a step has.
    """
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from autopar.lower.program import lower
    from autopar.runtime import monitor
    from autopar.runtime.job import stop
    from autopar.runtime.parallel_model import ParallelModel
    from autopar.runtime.same_values import EVERY
    from autopar.runtime.weights import ModelWeights
    from autopar.runtime.world import World
    from tools.fakes.watch import Watch

    key = (case.model, case.precision, case.layers)
    build, batch, graph = _traced(*key)
    plan = _planned(key, case.ranks, case.pins)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.ranks)
    try:
        world = World(plan.mesh, "cuda")
        program = lower(plan, graph, device=world.device, rank=world.rank)
        model = build()
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(Watch(record))
            record.phase = "build"
            parallel = ParallelModel(program, world, ModelWeights(model, 0))
            parallel._calls._group = None  # the others, whom no number comes from
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, **case.options)
            scaler = parallel.grad_scaler(enabled=case.scales) if case.precision == "fp16" else None
            steps = 3 if case.is_called else 2  # the third is measured by the monitor, and those after it
            for step in range(steps):
                _train(parallel, optimizer, scaler if case.scales else None, batch, record, is_last=step == steps - 1)
            if case.is_called:
                _call(parallel, batch, record)
            record.phase = "measured"
            if case.is_called:  # as if enough steps had been measured: the next one begins with the comparison
                enough = mock.patch.object(monitor, "MEASURED_STEPS", len(parallel.monitor._steps) + 1)
                with (
                    enough,
                    unset_fake_temporarily(),
                ):  # no tensor of a device is made: ranks compare what their hosts have
                    parallel.monitor.begin_step()
                assert parallel.monitor.record is not None
            parallel.monitor.close()
            if case.evaluates:
                record.phase = "evaluate"
                parallel.evaluate(batch)
            state = _save(parallel, optimizer, record)
            _load(parallel, state, record)
            record.phase = "loaded"
            parallel.step_count = EVERY  # the step before which copies are compared
            if case.evaluates:
                parallel.evaluate(batch)
            parallel._shared._is_alone = case.ranks == 1
            _look(parallel, case, batch)
            record.phase = "batch on the device"
            batch = {name: _there(value) for name, value in batch.items()}
            _look(parallel, case, batch)
            if case.evaluates:
                parallel.evaluate(batch)
            if case.is_called:
                parallel(**batch).loss.backward()
            record.phase = "end"
            for name, parameter in parallel.named_parameters():
                if parameter.device.type != "cuda":
                    record.add("devices mixed", f"parameter {name} on {parameter.device}")
    finally:
        stop()
    return int(plan.num_micro_batches)


def _look(parallel: Any, case: Case, batch: Any) -> None:
    """A step whose batch is compared with those of other ranks."""
    from autopar.runtime.step.local_batch import EVERY

    parallel._shared._calls = EVERY
    with parallel._calls.together("train_step"):
        parallel._train_step(batch)
    if case.ranks > 1:
        assert parallel._shared._calls > EVERY, "a look that no rank was refused in"


def _there(value: Any) -> Any:
    import torch

    return torch.empty_like(value, device="cuda")


def _train(parallel: Any, optimizer: Any, scaler: Any, batch: Any, record: Any, *, is_last: bool) -> None:
    def phase(name: str) -> None:
        record.phase = name if is_last else "warm"

    phase("step")
    with parallel._calls.together(
        "train_step"
    ):  # train_step makes a subclass of what it returns, which a fake tensor cannot be
        loss = parallel._train_step(batch)
    assert loss.device.type == "cuda", loss.device
    phase("clip")
    if scaler is not None:
        scaler.unscale_(optimizer)
    parallel.clip_grad_norm_(1.0)
    phase("optimizer")
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def _call(parallel: Any, batch: Any, record: Any) -> None:
    """A loss whose backward the user calls; once before, as what is kept is made there."""
    for phase in ("warm", "called"):
        record.phase = phase
        parallel(**batch).loss.backward()


def _save(parallel: Any, optimizer: Any, record: Any) -> tuple[set[str], dict[str, Any]]:
    """What goes to a checkpoint, but for the files: names of tensors, and values."""
    from autopar.runtime import state_dict, world
    from autopar.runtime.checkpoint import contents, series
    from autopar.runtime.step import gradients

    kept: list[tuple[set[str], dict[str, Any]]] = []

    def saved(path: str, own: Any, values: dict[str, Any], together: Any) -> Any:
        of = dict.fromkeys(own.settings, 0)
        sets = [next(iter(own.settings.values()))]
        kept.append(
            (
                {part.name for part in own.parts},
                values | {"optimizer": {"kind": type(optimizer).__name__, "settings": sets, "of": of, "numbers": {}}},
            )
        )
        return mock.Mock()

    record.phase = "save"
    with (
        mock.patch.object(series, "Save", saved),
        mock.patch.object(gradients.RankParameter, "is_sent", True),  # there is no other rank that could write
        mock.patch.object(state_dict.State, "sent", state_dict.State.named),
        mock.patch.object(contents, "random_states", return_value={}),
        mock.patch.object(contents, "compute_local_shape_and_global_offset", _places()),
        mock.patch.object(world.Peers, "all_gather", lambda self, value: [value] * self.size),
    ):
        parallel.save("nowhere", optimizer)
        if parallel.plan.mesh.pp == 1:
            parallel.full_state_dict()
    ((names, values),) = kept
    assert names
    assert all(name.startswith(("model.", "optimizer.", "buffer.")) for name in names)
    return names, values | {"states": {}}


def _places() -> Any:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from autopar.runtime.checkpoint import contents

    places = contents.compute_local_shape_and_global_offset  # type: ignore[attr-defined]

    def places_of(*args: Any) -> Any:
        with unset_fake_temporarily():  # torch numbers the parts of a tensor by tensors of the host, and reads them
            return places(*args)

    return places_of


def _load(parallel: Any, saved: tuple[set[str], dict[str, Any]], record: Any) -> None:
    """What comes from a checkpoint, for a job that has made no step yet: its optimizer is new, and has no states."""
    import torch

    from autopar.runtime import world
    from autopar.runtime.checkpoint import contents, series

    names, values = saved

    def put(parts: Any) -> None:
        for part in parts:
            part.value.copy_(torch.zeros(part.value.shape, dtype=part.value.dtype))  # as from a file

    def check_holds(wanted: Any, more: Any) -> None:
        assert not more
        others = {parallel._untrained.key(name) for name, _ in parallel._untrained.targets()}  # what other ranks save
        assert names >= set(wanted) - others, sorted(set(wanted) - others - names)

    loading = mock.Mock(put=put, check_holds=check_holds)
    loading.source.values, loading.source.tensors = values, names
    record.phase = LOADS
    with (
        mock.patch.object(series, "Loading", return_value=loading),
        mock.patch.object(contents, "compute_local_shape_and_global_offset", _places()),
        mock.patch.object(world.Peers, "all_gather", lambda self, value: [value] * self.size),
    ):
        parallel.load("nowhere", torch.optim.AdamW(parallel.parameters(), lr=1e-3))


@cache
def _traced(model: str, precision: PrecisionName, layers: int) -> tuple[Any, Any, Any]:
    """How the model is made, a batch and the graph."""
    import torch

    from autopar import api
    from autopar.models.resolve import resolve_model
    from tests.support.distributed.oddities import REMEMBERING, UNUSUAL

    if model in {"remembering", "unusual"}:
        subject = REMEMBERING if model == "remembering" else UNUSUAL["resting"]
        batch = subject.make_batch(BATCH, seed=0)
        graph = subject.trace(precision=precision, global_batch_size=BATCH)
        return subject.build, batch, graph
    source = resolve_model(model.format(layers=layers))
    graph = api.trace(
        source.model,
        example_inputs=source.example_inputs,
        precision=precision,
        name=source.name,
        global_batch_size=BATCH,
    )
    given, batch = source.make_batch(BATCH), dict[str, torch.Tensor]()
    for leaf in graph.inputs:
        value = given[leaf.name]
        batch[leaf.name] = value.to(leaf.spec.dtype) if value.is_floating_point() else value
    return source.build, batch, graph


@cache
def _planned(key: tuple[str, PrecisionName, int], ranks: int, pins: tuple[str, ...]) -> Any:
    from tests.support.distributed.plans import estimated

    options: Any = {"cluster": f"h100-sxm5-80gb:1x{ranks}", "precision": key[1], "pins": pins}
    return estimated(_traced(*key)[2], global_batch_size=BATCH, **options)


def _told(record: Any) -> dict[str, Any]:
    seen = [[*key, count] for key, count in sorted(record.seen.items())]
    return {"seen": seen, "launches": dict(record.launches)}


def _probe(record: Any) -> None:
    """Does on purpose what no program may do, each in a phase of its own."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tools.fakes.watch import Watch

    with FakeTensorMode(allow_non_fake_inputs=True), Watch(record):
        here, there = torch.ones(4, device="cuda"), torch.ones(4)
        faults: dict[str, Callable[[], Any]] = {
            "two devices": lambda: torch.where(here > 0, here, there),
            "up": lambda: there.to("cuda"),
            "down": here.cpu,
            "into": lambda: there.copy_(here),
            "numbers": lambda: torch.tensor([1.0, 2.0], device="cuda"),
            "item": lambda: here.sum().item(),
            "int": lambda: int(here[0]),
            "if": lambda: bool(here[0] > 0),
            "list": here.tolist,
            "where": here.nonzero,
            "mask": lambda: here[here > 0],
            "repeats": lambda: here.repeat_interleave(torch.ones(4, dtype=torch.int64, device="cuda")),
            "event": lambda: torch.cuda.Event().synchronize(),
            "fork": torch.cuda.get_rng_state,
            "questions": lambda: (here.device, here.dtype, here.shape, here.is_cuda, here.view(2, 2)),
            "all right": lambda: (
                (here * 2.0 + torch.tensor(1.0)).to(torch.bfloat16).sum() + there.to("cuda", non_blocking=True).sum()
            ),
        }
        for name, fault in faults.items():
            record.phase = name
            try:
                fault()
            except Exception as error:  # noqa: BLE001  a size that depends on values
                record.seen[name, "refused", type(error).__name__, ""] += 1


def main(guard: str, output: str, *names: str) -> None:
    """See the module."""
    ctypes.CDLL(guard, mode=ctypes.RTLD_GLOBAL)  # before torch looks for devices
    gc.set_threshold(50_000, 20, 50)  # traces make millions of objects, of which few are garbage in circles
    warnings.filterwarnings("ignore")
    from autopar.ops import experts as expert_ops
    from autopar.runtime import local_optimizer
    from autopar.runtime.step import local_batch
    from tools.fakes.watch import Record, install

    record = Record()
    install(record)
    counted = expert_ops._sorted

    def sorted_by(chosen: Any, num_experts: int) -> Any:
        record.choices = chosen.numel()
        return counted(chosen, num_experts)

    expert_ops._sorted = sorted_by

    def read(numbers: Any) -> list[int]:
        record.add("host waits", "Tensor.tolist")
        return [0] * int(numbers.numel())

    local_optimizer._read = read

    def of_ranks(samples: Any, numbers: Any) -> list[Any]:
        zeros = [0] * numbers.shape[-1]
        return [zeros if numbers.dim() == 1 else [zeros] * len(numbers)] * len(samples._data_index)

    local_batch.SharedSamples._of_ranks = of_ranks  # type: ignore[assignment, method-assign]
    found: dict[str, Any] = {}
    if PROBE in names:
        _probe(record)
        found[PROBE] = _told(record)
    for _, name, case, rank in runs(names):
        record.__init__()  # type: ignore[misc]
        error, batches = "", 0
        try:
            batches = run(case, rank, record)
        except Exception as failure:  # noqa: BLE001  of whatever kind: it is what the test shows
            import traceback

            error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc(limit=-25)}"
        found[name] = {"error": error, "micro_batches": batches, **_told(record)}
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
