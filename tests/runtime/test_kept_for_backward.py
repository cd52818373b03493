import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.model import CostModel
from autopar.graph.graph import Graph, Ref
from autopar.graph.operator_kinds import made_again
from autopar.hardware.cluster import Cluster
from autopar.lower.emit import SEED
from autopar.lower.program import BlockProgram, lower
from autopar.ops.collectives import on_meshes
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP32, RECOMPUTES, Recompute
from autopar.runtime.job import start, stop
from autopar.runtime.step.kept_for_backward import Mover
from autopar.runtime.step.stage import BlockModule
from autopar.runtime.world import World
from autopar.tracing.trace import trace
from tests.support.close import assert_close
from tests.support.distributed import subjects
from tests.support.distributed.plans import make_plan
from tests.support.small_models import model_of

B, S, H, HEADS = 2, 16, 32, 8


def _layer(self: Any, x: Tensor) -> Tensor:
    """Attention written out, with dropout of scores and of what goes to the residual stream."""
    y = self.norm(x)
    q, k, v = (f(y).view(-1, S, HEADS, H // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value))
    scores = functional.dropout((q @ k.transpose(2, 3) * 0.25).softmax(dim=-1), 0.1)
    x = x + functional.dropout(self.out((scores @ v).transpose(1, 2).reshape(-1, S, H)), 0.1)
    return x + functional.dropout(self.down(functional.gelu(self.up(self.norm2(x)))), 0.1)


def layer() -> nn.Module:
    parts = {name: nn.Linear(H, H) for name in ("query", "key", "value", "out")}
    parts |= {"up": nn.Linear(H, 4 * H), "down": nn.Linear(4 * H, H)}
    return model_of(_layer, norm=nn.LayerNorm(H), norm2=nn.LayerNorm(H), **parts)


def stack() -> nn.Module:
    return model_of(lambda self, x: self.layers(x).sum(), layers=nn.Sequential(layer(), layer()))


@pytest.fixture(scope="module", autouse=True)
def meshes() -> Iterator[Any]:
    start("cpu")
    yield World(Mesh(), "cpu").meshes
    stop()


GRAPHS: dict[str, Callable[[], Graph]] = {
    "written out": lambda: trace(stack(), (torch.zeros(B, S, H, requires_grad=True),)),
    "llama": lambda: subjects.graph_of(subjects.HfSubject("llama")),
    "gpt2": lambda: subjects.graph_of(subjects.HfSubject("gpt2", depth=1)),
}


@cache
def graph_of(kind: str) -> Graph:
    return GRAPHS[kind]()


def blocks_of(graph: Graph, mode: Recompute) -> tuple[Graph, list[BlockProgram], list[BlockCost]]:
    """One rank's graph, its programs and their predicted costs."""
    plan = make_plan(graph, Mesh(), global_batch_size=2, micro_batch_size=2, recompute=mode)
    program = lower(plan, graph)
    model = CostModel(Cluster.parse("cpu:1x1"), FP32, "adamw")
    costs = [model.price(model.block_work(program.graph, block), Mesh()) for block in program.graph.blocks]
    return program.graph, list(program.stages[0].blocks), costs


class Storages(TorchDispatchMode):
    """Remembers every storage that an operator makes; ``others``: those that are there anyway."""

    def __init__(self, others: set[int]) -> None:
        super().__init__()
        self.others = others
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.add(x)
        return result

    def add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata in self.others:
            return
        self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    @property
    def alive_bytes(self) -> int:
        return sum(size for ref, size in self.made.values() if not ref.expired())


def inputs_of(graph: Graph, block: BlockProgram) -> list[Any]:
    """Values by name, the same for the same block; integers are small."""
    generator = torch.Generator().manual_seed(block.index)
    made: list[Any] = []
    specs = {ref.name: graph.spec(ref) for ref in graph._index.refs if ref.index == 0}
    for name in block.inputs:
        spec = specs.get(name)
        if spec is None:
            made.append(7)
            assert name == SEED
        elif spec.dtype.is_floating_point:
            values = torch.rand(spec.shape, generator=generator, dtype=spec.dtype)
            made.append(values.requires_grad_(spec.requires_grad))
        else:
            made.append(torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype))
    return made


def module_of(block: BlockProgram, meshes: Any) -> BlockModule:
    module = BlockModule(block, meshes)
    generator = torch.Generator().manual_seed(block.index)
    for name, parameter in list(module.body.named_parameters()):
        values = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) / 4
        module.body.register_parameter(name, nn.Parameter(values, parameter.requires_grad))
    return module


def is_shared(graph: Graph, name: str) -> bool:
    return graph.is_prelude(Ref(name)) or graph.is_parameter(Ref(name))


def kept_bytes(graph: Graph, block: BlockProgram, meshes: Any) -> int:
    """What lives between a block's forward and backward but parameters and what stages have anyway."""
    module = module_of(block, meshes)
    inputs = [x.clone() if isinstance(x, Tensor) else x for x in inputs_of(graph, block)]  # autograd holds leaves
    named = dict(zip(block.inputs, inputs, strict=True))
    shared = [x for name, x in named.items() if isinstance(x, Tensor) and is_shared(graph, name)]
    found = Storages({x.untyped_storage()._cdata for x in (*module.parameters(), *shared)})
    for name, value in zip(block.inputs, inputs, strict=True):
        if isinstance(value, Tensor) and not is_shared(graph, name):
            found.add(value)
    with found, on_meshes(meshes):
        outputs = module(*inputs)
    history = [x.grad_fn for x in outputs]
    del inputs, named, outputs, value
    assert history
    return found.alive_bytes


@pytest.mark.parametrize("mode", RECOMPUTES)
@pytest.mark.parametrize("kind", ["written out", "llama"])
def test_a_block_keeps_what_is_predicted(meshes: Any, kind: str, mode: Recompute) -> None:
    graph, blocks, costs = blocks_of(graph_of(kind), mode)
    found = [kept_bytes(graph, block, meshes) for block in blocks]
    if kind == "llama" and mode != "full":  # torch's attention keeps the boolean mask as numbers
        found = [max(0, kept - 4 * B * S * S) for kept in found]
    assert found[:-1] == [cost.kept_bytes(mode) for cost in costs[:-1]]  # the last has the loss alone


def test_what_is_made_again_of_a_gated_layer() -> None:
    """Rotary positions are, where keys are repeated behind them; those of queries would free as much as they keep."""
    graph = graph_of("llama")
    ops = graph.block_ops(graph.blocks[1])
    found = [ops[i].target.split(".")[1] for i in sorted(made_again(graph, graph.blocks[1]))]
    norm = ["pow", "mean", "add", "rsqrt", "mul", "mul"]
    keys = ["mul", "neg", "cat", "mul", "add", "view"]
    assert found == [*norm, *keys, "view", *norm, "silu", "mul"]


def test_bytes_of_a_layer_by_hand() -> None:
    """Of s b h (34 + 5 a s / h) (Korthikanti et al. 2022) without the input of two norms' products and that of the last product.

    In single precision: twice the paper's bytes, masks of a byte each aside.
    """
    graph = graph_of("written out")
    model = CostModel(Cluster.parse("cpu:1x1"), FP32, "adamw")
    cost = model.price(model.block_work(graph, graph.blocks[1]), Mesh())
    sbh, scores = B * S * H, HEADS * S * S * B
    paper = 2 * 32 * sbh + 2 * sbh + 2 * 4 * scores + scores
    norms = 2 * 2 * B * S * 4
    assert cost.kept_bytes("none") == paper + norms
    made_again_bytes = 4 * (sbh + sbh + 4 * sbh) + 4 * 2 * scores + scores + norms
    assert cost.kept_bytes("selective") == paper + norms - made_again_bytes
    assert cost.passing_bytes("selective") >= made_again_bytes
    assert cost.recompute_s("none") == 0 < cost.recompute_s("selective") < cost.recompute_s("full")


@pytest.mark.parametrize("kind", GRAPHS)
def test_loss_and_gradients_are_the_same(meshes: Any, kind: str) -> None:
    graph, blocks, costs = blocks_of(graph_of(kind), "selective")
    _, others, _ = blocks_of(graph_of(kind), "none")
    assert any(cost.kept_bytes("selective") < cost.kept_bytes("none") for cost in costs)
    for block, other in zip(blocks, others, strict=True):
        found = []
        for own in (block, other):
            module, inputs = module_of(own, meshes), inputs_of(graph, own)
            with on_meshes(meshes):
                outputs = module(*inputs)
            torch.manual_seed(0)
            learnt = [x for x in outputs if x.requires_grad]
            torch.autograd.backward(learnt, [torch.rand_like(x) for x in learnt])
            leaves = [x for x in (*inputs, *module.parameters()) if isinstance(x, Tensor) and x.requires_grad]
            found.append([*outputs, *(x.grad for x in leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _wave(self: Any, x: Tensor, scale: Tensor) -> Tensor:
    y = self.up(x).sin()
    return x + self.down((y * y.transpose(0, 1).transpose(0, 1)).cos()) * scale  # type: ignore[no-any-return]


def wave(width: int) -> nn.Module:
    return model_of(_wave, up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))


def gradients(device: str, width: int, rows: int, *, moves: bool) -> tuple[list[Tensor], Mover, int]:
    """Of four blocks; the bytes that the device holds at the end of the forward of all of them."""
    torch.manual_seed(0)
    blocks = [wave(width).to(device) for _ in range(4)]
    mover, scale = Mover(device), torch.full((width,), 0.5, device=device)
    held = 0
    for seed in range(2):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device)
        mover.begin([x, scale])
        for block in blocks:
            with mover.block(block.parameters()) if moves else nullcontext():
                x = block(x, scale)
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        (x * x).sum().backward()
    return [p.grad for block in blocks for p in block.parameters() if p.grad is not None], mover, held


def test_gradients_are_the_same_and_each_storage_moves_once() -> None:
    plain, _, _ = gradients("cpu", 8, 16, moves=False)
    found, mover, _ = gradients("cpu", 8, 16, moves=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    row = 16 * 8 * 4
    # outputs of the first linear, of sine, product and cosine; of all blocks but the first what enters: that stays for others
    assert mover.offloaded_bytes == mover.reloaded_bytes == 2 * (4 * 4 * 4 * row + 3 * row)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Collections look at what the test makes alone."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_nothing_outlives_the_graph_that_kept_it() -> None:
    block, mover = wave(8), Mover("cpu")
    x = torch.randn(4, 8)
    mover.begin([x])
    with mover.block(block.parameters()):
        y = block(x, torch.ones(8))
    saved = mover._copying()
    assert saved._on_device == []  # on the host alone
    kept = weakref.ref(saved)
    del saved
    gc.collect()
    assert kept() is not None
    y.sum().backward()
    del y
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
def test_a_gpu_holds_less_and_computes_the_same() -> None:
    plain, _, full = gradients("cuda", 1024, 4096, moves=False)
    found, mover, held = gradients("cuda", 1024, 4096, moves=True)
    assert_close(found, plain, 1e-4)
    assert mover.offloaded_bytes > 0
    assert held < 0.6 * full
