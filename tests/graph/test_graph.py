import networkx
import torch

from autopar.graph.aliasing import contiguous
from autopar.models.resolve import resolve_model


def test_tensors_and_operators_are_nodes_in_topological_order_and_edges_what_is_read() -> None:
    graph = resolve_model("gpt:layers=3,hidden=32,heads=2,vocab=64", sequence_length=8).trace()
    found = graph.to_networkx()
    kinds = networkx.get_node_attributes(found, "kind")
    assert [name for name, kind in kinds.items() if kind == "op"] == [op.name for op in graph.ops]
    assert [name for name, kind in kinds.items() if kind == "prelude"] == [op.name for op in graph.prelude]
    assert {name for name, kind in kinds.items() if kind == "parameter"} == {p.name for p in graph.parameters}
    assert set(kinds.values()) == {"input", "parameter", "buffer", "prelude", "op"}
    position = {name: i for i, name in enumerate(found)}
    assert all(position[maker] < position[reader] for maker, reader in found.edges())
    assert found.number_of_edges() == sum(len(op.operands) for op in (*graph.prelude, *graph.ops))
    for op in graph.ops:
        read = sorted(
            (maker, data["output"], data["num_bytes"]) for maker, _, data in found.in_edges(op.name, data=True)
        )
        assert read == sorted((ref.name, ref.index, graph.spec(ref).num_bytes) for ref in op.operands)
    assert (found.graph["name"], found.graph["batch_size"]) == (graph.name, graph.batch_size)
    weight = graph.parameters[0]
    assert found.nodes[weight.name] == {
        "kind": "parameter", "fqn": weight.fqn, "outputs": (weight.spec,), "num_bytes": weight.spec.num_bytes,
    }  # fmt: skip
    loss = found.nodes[found.graph["loss"]]
    assert loss["block"] == graph.blocks[-1].index and loss["target"] == graph.ops[-1].target
    assert networkx.descendants(found, found.graph["loss"]) == set()


def test_strides_of_a_dense_tensor() -> None:
    for shape in [(), (3,), (2, 3, 4), (2, 0, 4)]:
        assert contiguous(shape) == torch.empty(shape).stride()
