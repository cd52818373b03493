"""Test help: all ranks of a small mesh as threads of this process, and a plain interpreter of graphs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from autopar import ops
from autopar.graph.ir import Argument, Graph, Ref
from autopar.lower.program import Program
from autopar.mesh import MESH_AXES, Mesh

TIMEOUT_S = 60.0


def run_ranks(mesh: Mesh, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` on every rank, with the mesh set; raises what a rank raised."""
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()
    results: list[Any] = [None] * mesh.world_size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=mesh.world_size, store=store)
            device_mesh = init_device_mesh("cpu", mesh.degrees, mesh_dim_names=MESH_AXES)
            with torch.autograd.set_multithreading_enabled(False), spmd_types.set_current_mesh(device_mesh):
                results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(mesh.world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads) or errors, "a rank hangs"
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
    if errors:
        raise errors[0]
    return results


def interpret(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a graph, run operator by operator on whole tensors (by name of input and parameter)."""
    env: dict[Ref, Any] = {Ref(name): tensor for name, tensor in tensors.items()}
    env |= {Ref(b.name): b.value for b in graph.buffers if b.value is not None}

    def value(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return env[argument]
        return [value(item) for item in argument] if isinstance(argument, tuple) else argument

    for op in (*graph.prelude, *graph.ops):
        result = ops.resolve(op.target)(*map(value, op.args), **{key: value(item) for key, item in op.kwargs})
        many = result if isinstance(result, (tuple, list)) else (result,)
        env |= {Ref(op.name, i): item for i, item in enumerate(many)}
    found = env[graph.loss]
    assert isinstance(found, torch.Tensor)
    return found


def slice_of(tensor: torch.Tensor, layout: Any, mesh: Mesh, rank: int) -> torch.Tensor:
    """One rank's part of a whole tensor."""
    for axis, kind in layout:
        if kind.is_split and axis in MESH_AXES:
            tensor = tensor.chunk(getattr(mesh, axis), kind.dim)[mesh.coordinate(rank)[axis]]
    return tensor


def parts(graph: Graph, whole: Mapping[str, torch.Tensor], mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    """One rank's parameters of a local graph, leaves that require grad."""
    return {
        p.name: slice_of(whole[p.name], p.layout, mesh, rank).detach().clone().requires_grad_(p.spec.requires_grad)
        for p in graph.parameters
    }


def run_program(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    totals: Mapping[str, torch.Tensor],
    seed: int = 0,
) -> torch.Tensor:
    """The loss of all stages of a program for one micro-batch, in one process."""
    live: dict[str, Any] = {}
    for stage in program.stages:
        received = {name: live[name] for name in stage.receives}
        env: dict[str, Any] = {**received, "rng_seed": seed}
        env |= {name: parameters[name] for name in stage.shared_parameters}
        if stage.prelude is not None:
            given = {**batch, **totals}
            values = stage.prelude.module(*(given[name] for name in stage.prelude.inputs))
            env |= dict(zip(stage.prelude.outputs, values, strict=True))
        for block in stage.blocks:
            module = copy.deepcopy(block.module)  # ranks are threads of one process
            for name in block.parameters:
                module._parameters[name] = parameters[name]  # type: ignore[assignment]
            values = module(*(env[name] for name in block.inputs))
            env |= dict(zip(block.outputs, values, strict=True))
        live = {name: env[name] for name in (*stage.sends, *([program.loss] if stage.is_last else ()))}
    loss = live[program.loss]
    assert isinstance(loss, torch.Tensor)
    return loss


def run_sums(program: Program, batches: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Totals over micro-batches."""
    if program.sums is None:
        return {}
    totals: dict[str, torch.Tensor] = {}
    for batch in batches:
        for name, value in zip(
            program.sums.outputs, program.sums.module(*(batch[n] for n in program.sums.inputs)), strict=True
        ):
            totals[name] = totals[name] + value if name in totals else value
    return totals


def dense(graph: Graph, whole: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {p.name: whole[p.name].clone().requires_grad_() for p in graph.parameters}
    loss = interpret(graph, {**whole, **leaves})
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def sharded(
    program: Program, whole: dict[str, torch.Tensor], rank: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the global batch on one rank, micro-batch by micro-batch, data ranks included."""
    graph, mesh = program.graph, program.mesh
    size, count = program.plan.micro_batch_size, program.plan.num_micro_batches
    first = mesh.data_index(rank) * count
    batches = [
        {i.name: whole[i.name][(first + m) * size : (first + m + 1) * size] for i in graph.inputs} for m in range(count)
    ]
    totals = run_sums(program, batches)
    for value in totals.values():
        dist.all_reduce(value, group=ops.group("dp_replicate"))
    leaves = parts(graph, whole, mesh, rank)
    loss = torch.zeros(())
    for batch in batches:
        part = run_program(program, leaves, batch, totals)
        part.backward()
        loss += part.detach()
    dist.all_reduce(loss, group=ops.group("dp_replicate"))
    gradients = {}
    for parameter in graph.parameters:
        gradient = leaves[parameter.name].grad
        assert gradient is not None, parameter.name
        for axis in ("dp_replicate", *parameter.gradient_sum_axes):
            dist.all_reduce(gradient, group=ops.group(axis))
        gradients[parameter.name] = gradient
    return loss, gradients
