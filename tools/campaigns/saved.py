"""Pairs as JSON: what a campaign finds wrong is kept as data, whatever becomes of the way models are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from autopar.graph.graph import Block, Buffer, Graph, Input, Op, Parameter, Ref, TensorSpec
from autopar.plan.file import plan_from_dict, plan_to_dict
from tools.campaigns.pairs import Pair


def write(pair: Pair) -> str:
    """The pair as text."""
    both = {"plan": plan_to_dict(pair.plan), "whole": _graph(pair.whole), "traced": _graph(pair.traced)}
    return json.dumps(both, sort_keys=True)


def read(path: Path) -> Pair:
    """A pair from a file that :func:`write` filled."""
    data = json.loads(path.read_text())
    return Pair(plan=plan_from_dict(data["plan"]), whole=_read_graph(data["whole"]), traced=_read_graph(data["traced"]))


def _argument(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": [value.name, value.index]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return [_argument(item) for item in value] if isinstance(value, tuple) else value


def _read_argument(value: Any) -> Any:
    if isinstance(value, dict):
        return Ref(*value["ref"]) if "ref" in value else getattr(torch, value["dtype"])
    return tuple(_read_argument(item) for item in value) if isinstance(value, list) else value


def _spec(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.requires_grad]


def _read_spec(data: list[Any]) -> TensorSpec:
    return TensorSpec(shape=tuple(data[0]), dtype=getattr(torch, data[1]), requires_grad=data[2])


def _op(op: Op) -> dict[str, Any]:
    return {
        "name": op.name,
        "target": op.target,
        "args": _argument(op.args),
        "kwargs": [[key, _argument(value)] for key, value in op.kwargs],
        "outputs": [_spec(spec) for spec in op.outputs],
    }


def _read_op(data: dict[str, Any]) -> Op:
    return Op(
        name=data["name"],
        target=data["target"],
        args=_read_argument(data["args"]),
        kwargs=tuple((key, _read_argument(value)) for key, value in data["kwargs"]),
        outputs=tuple(_read_spec(spec) for spec in data["outputs"]),
    )


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "batch_size": graph.batch_size,
        "inputs": [[x.name, _spec(x.spec)] for x in graph.inputs],
        "parameters": [[x.name, _spec(x.spec)] for x in graph.parameters],
        "buffers": [[x.name, _spec(x.spec), x.value.tolist()] for x in graph.buffers if x.value is not None],
        "prelude": [_op(op) for op in graph.prelude],
        "ops": [_op(op) for op in graph.ops],
        "blocks": [[b.start, b.stop] for b in graph.blocks],
        "loss": graph.loss.name,
    }


def _read_graph(data: dict[str, Any]) -> Graph:
    buffers = [(name, _read_spec(spec), value) for name, spec, value in data["buffers"]]
    return Graph(
        name="fuzz",
        batch_size=data["batch_size"],
        inputs=tuple(Input(name=name, spec=_read_spec(spec), batch_dim=0) for name, spec in data["inputs"]),
        parameters=tuple(
            Parameter(name=name, fqn=f"m.{name}", spec=_read_spec(spec)) for name, spec in data["parameters"]
        ),
        buffers=tuple(
            Buffer(name=name, fqn="", spec=spec, value=torch.tensor(value, dtype=spec.dtype))
            for name, spec, value in buffers
        ),
        prelude=tuple(map(_read_op, data["prelude"])),
        ops=tuple(map(_read_op, data["ops"])),
        blocks=tuple(
            Block(index=i, start=a, stop=b, hash=f"block{i}", label=f"m.{i}") for i, (a, b) in enumerate(data["blocks"])
        ),
        loss=Ref(data["loss"]),
        fingerprint="fuzz",
    )
