"""What people try around a parallel model in their first hour; run on every rank, by name."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from autopar import api
from autopar.graph.graph import Graph
from autopar.hardware.places import place_here
from autopar.hardware.read import load_profile
from autopar.plan.plan import Plan
from autopar.request import Request
from autopar.runtime.launch import launch
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.reference import adamw
from tests.support.distributed.jobs import Batch, steps
from tests.support.distributed.subjects import HfSubject
from tests.support.parallel import halve


def in_inference_mode(
    subject: HfSubject, plan: Plan, graph: Graph, batch: Batch, folder: str
) -> tuple[list[float], bool]:
    """Losses of steps between what was made, evaluated, clipped, saved and loaded in inference mode; whether states are of it."""
    model: nn.Module = subject.build()
    with torch.inference_mode():
        parallel = launch(model, lambda: (plan, graph), device_type="cpu")
        losses = [parallel.evaluate(batch).item()]
    optimizer = adamw(parallel.parameters())
    losses.append(parallel.train_step(batch).item())
    with torch.inference_mode():
        whole = parallel.full_gradients()
        parallel.clip_grad_norm_(1e6)
    optimizer.step()
    with torch.inference_mode():
        whole |= parallel.full_state_dict()
        parallel.save(folder, optimizer)
        parallel.load(folder, optimizer)
        losses.append(parallel.evaluate(batch).item())
    losses.append(parallel.train_step(batch).item())
    return losses, any(tensor.is_inference() for tensor in whole.values())


def without_a_cluster(subject: HfSubject, batch: Batch) -> tuple[str, str, list[tuple[int, int]]]:
    """What is planned where nobody names the cluster and every two ranks say that they are on another host."""
    rank, planned = dist.get_rank(), []
    found = place_here()
    node = replace(found, host=(f"node{rank // 2}", ""))
    search = api._searched

    def noted(model: nn.Module, request: Request, *rest: Any) -> tuple[Plan, Graph]:
        planned.extend((group.num_nodes, group.devices_per_node) for group in request.cluster.groups)
        return search(model, request, *rest)

    with (
        mock.patch("autopar.hardware.places.place_here", return_value=node),
        mock.patch("autopar.hardware.places.machine_profile", return_value=load_profile("cpu")),
        mock.patch("autopar.api._searched", noted),
    ):
        parallel = api.parallelize(subject.build(), example_inputs=batch, global_batch_size=16, pins=["dp=4"])
    parallel.train_step(batch)
    return parallel.plan.cluster, str(parallel.plan.mesh), planned


def saved_by_torch(parallel: ParallelModel, batch: Batch, folder: str) -> float:
    """The loss after a step, of a model that ``torch.distributed.checkpoint`` then saves."""
    steps(parallel, adamw(parallel.parameters()), [batch])
    dcp.save({"model": parallel}, checkpoint_id=folder)
    return parallel.evaluate(batch).item()


def loaded_by_torch(parallel: ParallelModel, batch: Batch, folder: str, kept: str) -> tuple[int, float]:
    """Steps and loss of a model of other weights that ``torch.distributed.checkpoint`` has loaded, and saved elsewhere."""
    halve(parallel)
    dcp.load({"model": parallel}, checkpoint_id=folder)
    dcp.save({"model": parallel}, checkpoint_id=kept)
    return parallel.step_count, parallel.evaluate(batch).item()
