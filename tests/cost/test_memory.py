import math

import pytest
import torch
from torch import nn

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.model import CostModel, StageCost
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.step.data_parallel import DataParallel
from autopar.cost.step.memory import State, optimizer_cost, state_bytes
from autopar.cost.step.step import Runtime
from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, FP32, Precision
from tests.support.blocks_by_hand import block, stage, step
from tests.support.said import refuses

CLUSTER = Cluster.parse("h100-sxm5-80gb:4x8")
MODEL = CostModel(CLUSTER, FP32, "sgd")
N = 1024 * 1024


def state(precision: Precision, zero: int, shards: int, pp: int = 1, count: int = 4, optimizer: str = "adamw") -> State:
    mesh = Mesh(pp=pp, dp_shard=shards)
    data = DataParallel(mesh, zero, precision, pp > 1)
    parameter = ParameterCost(name="w", shape=(N // 16, 16), num_bytes=N * 4)
    unit = Runtime().unit((parameter,), data, CollectiveModel(CLUSTER), CLUSTER.devices[0])
    return state_bytes(unit, data, optimizer_cost(optimizer), count)


@pytest.mark.parametrize(
    ("precision", "zero", "shards", "pp", "count", "expected"),
    [
        (FP32, 0, 1, 1, 4, (4, 4, 8)),
        (BF16, 0, 1, 1, 4, (4 + 2, 4, 8)),  # whole gradients accumulate in fp32
        (FP32, 1, 8, 1, 4, (4 / 8 + 4, 4, 8 / 8)),
        (FP32, 1, 8, 1, 1, (4 / 8 + 4, 4 / 8, 8 / 8)),  # nothing to accumulate
        (FP32, 2, 8, 1, 4, (4 / 8 + 4, 4 / 8, 8 / 8)),
        (FP32, 3, 8, 1, 4, (4 / 8, 4 / 8, 8 / 8)),
        (BF16, 1, 8, 1, 4, (4 / 8 + 2, 4, 8 / 8)),
        (BF16, 2, 8, 1, 4, (4 / 8 + 2, 4 / 8, 8 / 8)),
        (BF16, 3, 8, 1, 4, (4 / 8, 4 / 8, 8 / 8)),
        (BF16, 3, 8, 2, 4, (4 / 8, 4, 8 / 8)),  # with a pipeline gradients are reduced at the end of the step
    ],
)
def test_bytes_of_a_parameter(
    precision: Precision, zero: int, shards: int, pp: int, count: int, expected: tuple[float, float, float]
) -> None:
    found = state(precision, zero, shards, pp, count)
    assert (found.parameters / N, found.gradients / N, found.optimizer / N) == pytest.approx(expected)


def test_adafactor_keeps_a_row_and_a_column_and_8_bit_states_are_declared() -> None:
    rows, columns = N // 16, 16
    assert state(FP32, 0, 1, optimizer="adafactor").optimizer == 4 * (rows + columns)
    assert state(FP32, 3, 8, optimizer="adafactor").optimizer == 4 * (rows // 8 + columns)
    assert optimizer_cost("adafactor").state_bytes((7,), 4) == 4 * 7
    assert state(FP32, 0, 1, optimizer="adamw:bytes=2").optimizer == 2 * N
    assert state(FP32, 3, 8, optimizer="AdamW:bytes=2.03125").optimizer == round(2.03125 * N / 8)
    refuses(UsageError, "no number of bytes of states", optimizer_cost, "adamw:bytes=few")


def test_states_of_torchs_optimizers_are_those_that_they_keep() -> None:
    made = {name.lower(): getattr(torch.optim, name) for name in ("AdamW", "Adam", "Adafactor", "SGD")}
    made["momentum"] = lambda parameters: torch.optim.SGD(parameters, momentum=0.9)
    for name, make in made.items():
        parameters = [nn.Parameter(torch.ones(shape)) for shape in ((6, 5), (3, 4, 5), (7,), (1,))]
        optimizer = make(parameters)
        sum(p.sum() for p in parameters).backward()
        optimizer.step()
        states = [(k, v) for own in optimizer.state.values() for k, v in own.items()]
        kept = [v for k, v in states if isinstance(v, torch.Tensor) and k != "step"]
        predicted = sum(optimizer_cost(name).state_bytes(tuple(p.shape), 4) for p in parameters)
        assert sum(v.numel() * v.element_size() for v in kept) == predicted, name


def test_uneven_shards_count_the_fullest_rank() -> None:
    odd = ParameterCost(name="w", shape=(10, 3), num_bytes=120)
    assert [odd.shard_numel(n) for n in (1, 4, 8, 16)] == [30, 9, 6, 3]
    assert ParameterCost(name="s", shape=(), num_bytes=4).shard_numel(8) == 1


# --- activations


def activations(stages: list[StageCost], *, mesh: Mesh, schedule: str, count: int) -> list[int]:
    model = CostModel(CLUSTER, FP32, "adamw")
    return [m.activations for m in model.memory(stages, step(mesh, schedule=schedule, count=count))]


def test_activations_follow_the_schedule() -> None:
    one = stage(block())
    four = [stage(block(f"layer{i}")) for i in range(4)]
    pipe = Mesh(pp=4)
    assert activations([one], mesh=Mesh(), schedule="none", count=8) == [1000]
    # 1000 kept by the block and 100 that the stage sends; the last stage sends nothing
    assert activations(four, mesh=pipe, schedule="1F1B", count=8) == [4 * 1100, 3 * 1100, 2 * 1100, 1000]
    assert activations(four, mesh=pipe, schedule="GPipe", count=8) == [8 * 1100] * 3 + [8000]
    virtual = activations(four, mesh=Mesh(pp=2), schedule="Interleaved1F1B", count=4)
    assert virtual == [3 * 1100 + 2 * 1100, 3 * 1100]  # the latter before stage 3 begins


def test_recompute_keeps_inputs_and_pays_in_passing() -> None:
    blocks = [block(f"l{i}") for i in range(8)]
    plain, again = (MODEL.memory([stage(*blocks, recompute=r)], step(Mesh()))[0] for r in ("none", "full"))
    assert (plain.activations, plain.transient) == (8000, 50)
    assert (again.activations, again.transient) == (8 * 100, 1000 + 50)


def test_gathered_blocks_are_in_passing() -> None:
    layers = stage(*(block(f"l{i}") for i in range(4)))
    found = MODEL.memory([layers], step(Mesh(dp_shard=8), zero=3))[0]
    # two gathered blocks, the gradients of one and the buffer that is reduced
    assert found.transient == pytest.approx(4 * N * 4 + 50, rel=0.01)
    assert found.parameters == 4 * N * 4 // 8


def test_whole_gradients_are_gone_when_parameters_are_stepped() -> None:
    """FSDP's shards take their place, so that the optimizer's temporaries are not beside them."""
    model = CostModel(CLUSTER, BF16, "adamw")
    layers = stage(*(block(f"l{i}") for i in range(16)))
    once, often = (model.memory([layers], step(Mesh(dp_shard=2), zero=1, count=count))[0] for count in (1, 4))
    assert (once.gradients, often.gradients) == (16 * 4 * N // 2, 16 * 4 * N)
    assert once.transient == pytest.approx(16 * 4 * N // 2, rel=0.01)  # temporaries of the shards
    assert often.transient == pytest.approx(4 * N, rel=0.01)  # the largest buffer that is reduced


def test_tied_weights_are_held_once_a_stage() -> None:
    tied = ParameterCost(name="embed", shape=(1024, 1024), num_bytes=4 * N, shared=True)
    first, last = block("embed", parameters=(tied,)), block("head", parameters=(tied,))
    whole = MODEL.memory([stage(first, block(), last)], step(Mesh()))[0]
    assert whole.parameters == 2 * 4 * N
    apart = MODEL.memory([stage(first, block()), stage(last)], step(Mesh(pp=2), schedule="1F1B"))
    assert [m.parameters for m in apart] == [2 * 4 * N, 4 * N]


def test_reserves_and_fragmentation_come_from_the_profile() -> None:
    device = CLUSTER.devices[0]
    found = MODEL.memory([stage(block())], step(Mesh()))[0]
    tensors = found.total - found.reserved
    assert found.reserved == device.reserved_bytes + round(device.fragmentation * tensors)
    assert math.isclose(tensors, 8 * N + 1000, rel_tol=0.01)
