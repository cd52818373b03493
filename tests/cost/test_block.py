from dataclasses import replace

import pytest
import torch

from autopar.cost.blocks.block_cost import BlockCost, Message, messages
from autopar.cost.model import CostModel
from autopar.cost.operators.operator_times import EXPERT_TARGETS, experts_as_run, experts_wait_s, op_time
from autopar.cost.operators.work import work
from autopar.graph.graph import Argument, Graph, Op, Parameter, Ref, TensorSpec
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP32
from tests.support.graphs_by_hand import graph_of_ops
from tests.support.kept import kept_bytes
from tests.support.small_models import evaluate
from tests.support.zoo import LENGTH, subject, traced

MODEL = CostModel(Cluster.parse("cpu:1x4"), FP32, "adamw")


def priced(graph: Graph) -> list[BlockCost]:
    return [MODEL.price(MODEL.block_work(graph, block), Mesh()) for block in graph.blocks]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "vit", "t5", "handwritten"])
def test_saved_bytes_are_autograds(kind: str) -> None:
    model, batch = subject(kind)
    graph, whole = traced(kind), dict(model.named_parameters())
    given = (*whole.values(), *batch.values())  # a step holds both
    kept = kept_bytes(lambda: evaluate(graph, batch, whole, dict(model.named_buffers())), given)
    assert sum(cost.saved_bytes for cost in priced(graph)) == pytest.approx(kept, rel=0.01)


def test_equal_blocks_cost_the_same_and_parameters_are_counted_once_tied_ones_with_a_mark() -> None:
    graph = traced("llama", layers=3)
    costs = priced(graph)
    classes: dict[str, set[tuple[float, int, int]]] = {}
    for cost in costs:
        kept = (cost.forward_s, cost.saved_bytes, cost.backward_transient_bytes)
        classes.setdefault(cost.key, set()).add(kept)
    assert max(map(len, classes.values())) == 1 and len(classes) < len(costs)
    assert sum(p.num_bytes for c in costs for p in c.parameters) == 4 * graph.num_parameters
    layer = max(costs, key=lambda cost: cost.flops)
    tokens, hidden, ffn = 2 * LENGTH, 32, 64  # and half as many keys and values
    assert layer.flops == pytest.approx(2 * tokens * (3 * hidden**2 + 3 * hidden * ffn + (LENGTH + 1) * hidden))
    assert layer.input_bytes == layer.send_bytes == tokens * hidden * 4
    assert layer.kept_bytes("full") < layer.kept_bytes("selective") < layer.kept_bytes("none")
    assert layer.passing_bytes("full") >= layer.saved_bytes
    shared = [p.name for cost in priced(traced("llama_tied")) for p in cost.parameters if p.shared]
    assert (len(shared), len(set(shared))) == (2, 1)


# --- collectives of emitted operators

FULL = TensorSpec(shape=(4, 8, 16), dtype=torch.bfloat16, requires_grad=True)
PART = replace(FULL, shape=(4, 2, 16))
FULL_BYTES = FULL.num_bytes


def change(name: str, *args: Argument, source: TensorSpec, out: TensorSpec) -> set[tuple[str, int, bool]]:
    op = Op(name="y", target=f"autopar.{name}", args=(Ref("x"), "tp", *args), outputs=(out,))
    graph = graph_of_ops("g", [op], {}, [Parameter(name="x", fqn="x", spec=source)])
    found = list(messages(op, graph.spec))
    assert all(isinstance(message, Message) and message.axis == "tp" for message in found)
    return {(message.kind, message.num_bytes, message.backward) for message in found}


def test_messages_of_changes_of_type_and_of_the_split_loss() -> None:
    reduced = {("all_reduce", FULL_BYTES, False)}
    assert change("all_reduce", "I", source=FULL, out=FULL) == reduced
    assert change("all_reduce", "R", source=FULL, out=FULL) == reduced | {("all_reduce", FULL_BYTES, True)}
    gathered = {("all_gather", FULL_BYTES, False)}
    assert change("all_gather", 1, "R", source=PART, out=FULL) == gathered | {("reduce_scatter", FULL_BYTES, True)}
    assert change("all_gather", 1, "I", source=PART, out=FULL) == gathered
    scattered = {("reduce_scatter", FULL_BYTES, False), ("all_gather", FULL_BYTES, True)}
    assert change("reduce_scatter", 1, source=FULL, out=PART) == scattered
    exchanged = {("all_to_all", PART.num_bytes, False), ("all_to_all", PART.num_bytes, True)}
    assert change("all_to_all", 1, 2, source=PART, out=PART) == exchanged
    assert change("shard", 1, "I", source=FULL, out=PART) == {("all_gather", FULL_BYTES, True)}
    assert change("shard", 1, "R", source=FULL, out=PART) == set()
    assert change("invariant_to_replicate", source=FULL, out=FULL) == {("all_reduce", FULL_BYTES, True)}
    assert change("keep_on_first", "I", source=FULL, out=FULL) == set()
    still = replace(FULL, requires_grad=False)
    assert change("all_reduce", "R", source=still, out=still) == reduced
    logits = TensorSpec(shape=(4, 8, 100), dtype=torch.bfloat16, requires_grad=True)
    target = TensorSpec(shape=(4, 8), dtype=torch.int64)
    loss = TensorSpec(shape=(), dtype=torch.float32, requires_grad=True)
    args = (Ref("x"), Ref("t"), "tp", -100, 0.0)
    op = Op(name="y", target="autopar.cross_entropy_vocabulary", args=args, outputs=(loss,))
    graph = graph_of_ops("g", [op], {"t": target}, [Parameter(name="x", fqn="x", spec=logits)])
    assert [m.num_bytes for m in messages(op, graph.spec)] == [32 * 4, 2 * 32 * 4]


@pytest.mark.parametrize(("axes", "count"), [((), 0), (("tp",), 4), (("dp_replicate", "dp_shard", "tp"), 4)])
def test_messages_of_a_batch_norm_whose_space_is_split(axes: tuple[str, ...], count: int) -> None:
    image = TensorSpec(shape=(4, 8, 6, 6), dtype=torch.bfloat16, requires_grad=True)
    op = Op(name="y", target="autopar.batch_norm", args=(Ref("x"), None, None, 1e-5, *axes), outputs=(image,))
    graph = graph_of_ops("g", [op], {}, [Parameter(name="x", fqn="x", spec=image)])
    sent = [(m.kind, m.axis, m.num_bytes, m.backward) for m in messages(op, graph.spec)]
    assert sent == [("all_reduce", "tp", 8 * 4, back) for back in (False, False, True, True)][:count]


def experts_graph(target: str, tail: tuple[object, ...] = ()) -> tuple[Graph, Op]:
    """Four experts of 16 x 8 x 16, two for each of 32 tokens; ``tail``: arguments of the split kinds."""
    shapes = {"x": (32, 16), "w": (32, 2), "gate": (4, 8, 16), "up": (4, 8, 16), "down": (4, 16, 8)}
    specs = {k: TensorSpec(shape=v, dtype=torch.float32, requires_grad=True) for k, v in shapes.items()}
    names = ("x", "w", "i", "gate", "up", "down")
    op = Op(name="y", target=target, args=(*map(Ref, names), None, None, "silu", *tail), outputs=(specs["x"],))
    chosen = TensorSpec(shape=(32, 2), dtype=torch.int64)
    return graph_of_ops("g", [op], {"i": chosen}, [Parameter(name=k, fqn=k, spec=v) for k, v in specs.items()]), op


def test_the_host_waits_once_for_experts_but_of_one_rank_in_grouped_products() -> None:
    h100, a100 = (Cluster.parse(f"{name}:1x1").devices[0] for name in ("h100-sxm5-80gb", "a100-sxm4-80gb"))

    def op_of(target: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Op, list[TensorSpec]]:
        tail = () if target == "autopar.experts" else ("tp", 16, "tp", 2)
        graph, op = experts_graph(target, tail)
        operands = [graph.spec(ref) for ref in op.operands]
        specs = [replace(spec, dtype=dtype) if spec.dtype == torch.float32 else spec for spec in operands]
        return replace(op, outputs=(replace(op.spec, dtype=dtype),)), specs

    for target in EXPERT_TARGETS:
        for device in (h100, a100):
            unread = replace(device, blocking_launch_s=0.0, launch_s=0.0)
            for dtype in (torch.bfloat16, torch.float32):
                op, operands = op_of(target, dtype)
                is_grouped = device is h100 and dtype == torch.bfloat16
                waits = 0 if is_grouped and target == "autopar.experts" else 1
                assert experts_wait_s(op, device) == waits * device.blocking_launch_s
                work_s = op_time(op, operands, replace(unread, blocking_launch_s=1.0))
                without = op_time(op, operands, unread)
                assert work_s.forward_s - without.forward_s == pytest.approx(waits)
                assert work_s.backward_s == without.backward_s
                done = work(op, operands, "cuda")
                launches = experts_as_run(done, op, device).launches
                assert launches == (12 + 3 + 2 if is_grouped else done.launches)
    assert experts_wait_s(op_of("autopar.experts")[0], replace(h100, kind="cpu")) == 0
    assert experts_wait_s(op_of("autopar.experts")[0], replace(a100, blocking_launch_s=0.0)) == a100.launch_s


@pytest.mark.parametrize(
    ("name", "is_grouped"),
    [
        ("h100-hbm2e-96gb", True), ("h200-sxm-141gb", True), ("b200-sxm-180gb", True), ("gb200", True),
        ("nvidia-h100-80gb-hbm3", True), ("NVIDIA GH200 480GB", True), ("a100-sxm4-40gb", False), ("l4-24gb", False),
        ("mi300x-192gb", False), ("rtx-pro-6000-blackwell", False), ("gb10", False),
    ],
)  # fmt: skip
def test_gpus_with_grouped_products_are_known_by_name(name: str, is_grouped: bool) -> None:
    device = replace(Cluster.parse("a100-sxm4-80gb:1x1").devices[0], name=name)
    _, op = experts_graph("autopar.experts")
    op = replace(op, outputs=(replace(op.spec, dtype=torch.bfloat16),))
    assert (experts_wait_s(op, device) == 0) == is_grouped


def test_experts_cost_what_even_routing_gives() -> None:
    rows = 32 * 2
    graph, op = experts_graph("autopar.experts")
    done = work(op, [graph.spec(ref) for ref in op.operands])
    assert done.flops == 2 * rows * 3 * 8 * 16 and done.backward_flops == 2 * done.flops
    graph, op = experts_graph("autopar.experts_split", ("tp", 16))
    assert work(op, [graph.spec(ref) for ref in op.operands]).flops == done.flops / 4
    assert list(messages(op, graph.spec)) == []
    graph, op = experts_graph("autopar.experts_dispatch", ("tp", 16))
    assert work(op, [graph.spec(ref) for ref in op.operands]).flops == done.flops
    sent = [(m.kind, m.axis, m.num_bytes, m.backward) for m in messages(op, graph.spec)]
    assert sent == [("all_to_all", "tp", rows * 16 * 4, back) for back in (False, False, True, True)]
