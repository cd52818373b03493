import networkx
import pytest

from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model


@pytest.fixture(scope="module")
def graph() -> Graph:
    return resolve_model("gpt:layers=3,hidden=32,heads=2,vocab=64", sequence_length=8).trace()


def test_every_tensor_and_operator_is_a_node_in_topological_order(graph: Graph) -> None:
    found = graph.to_networkx()
    kinds = networkx.get_node_attributes(found, "kind")
    assert [name for name, kind in kinds.items() if kind == "op"] == [op.name for op in graph.ops]
    assert [name for name, kind in kinds.items() if kind == "prelude"] == [op.name for op in graph.prelude]
    assert {name for name, kind in kinds.items() if kind == "parameter"} == {p.name for p in graph.parameters}
    assert set(kinds.values()) == {"input", "parameter", "buffer", "prelude", "op"}
    position = {name: i for i, name in enumerate(found)}
    assert all(position[maker] < position[reader] for maker, reader in found.edges())
    assert networkx.is_directed_acyclic_graph(found)


def test_edges_are_what_operators_read(graph: Graph) -> None:
    found = graph.to_networkx()
    assert found.number_of_edges() == sum(len(op.operands) for op in (*graph.prelude, *graph.ops))
    for op in graph.ops:
        read = sorted(
            (maker, data["output"], data["num_bytes"]) for maker, _, data in found.in_edges(op.name, data=True)
        )
        assert read == sorted((ref.name, ref.index, graph.spec(ref).num_bytes) for ref in op.operands)


def test_attributes_say_what_a_node_is(graph: Graph) -> None:
    found = graph.to_networkx()
    assert (found.graph["name"], found.graph["batch_size"]) == (graph.name, graph.batch_size)
    weight = graph.parameters[0]
    assert found.nodes[weight.name] == {
        "kind": "parameter", "fqn": weight.fqn, "outputs": (weight.spec,), "num_bytes": weight.spec.num_bytes,
    }  # fmt: skip
    loss = found.nodes[found.graph["loss"]]
    assert loss["block"] == graph.blocks[-1].index
    assert loss["target"] == graph.ops[-1].target
    assert networkx.descendants(found, found.graph["loss"]) == set()
