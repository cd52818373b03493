"""Graphs of operators that a test lists."""

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.graph.graph import Block, Graph, Input, Op, Parameter, Ref, TensorSpec


def graph_of_ops(
    name: str, ops: Sequence[Op], inputs: Mapping[str, TensorSpec], parameters: Sequence[Parameter], **fields: Any
) -> Graph:
    """The last operator is the loss, samples are the first dim of all inputs, and without ``blocks`` there is one."""
    sizes = [spec.shape[0] for spec in inputs.values() if spec.shape]
    one = Block(index=0, start=0, stop=len(ops), hash="all", label="m")
    given = {"batch_size": sizes[0] if sizes else 1, "prelude": (), "blocks": (one,), "fingerprint": name} | fields
    return Graph(
        name=name,
        inputs=tuple(Input(name=k, spec=spec, batch_dim=0 if spec.shape else None) for k, spec in inputs.items()),
        parameters=tuple(parameters),
        buffers=(),
        ops=tuple(ops),
        loss=Ref(ops[-1].name),
        **given,
    )
