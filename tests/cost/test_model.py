from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import CostModel, StageCost
from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import scaled
from autopar.hardware.device import Overheads
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP32, Recompute
from autopar.plan.prediction import Prediction
from tests.support.blocks_by_hand import block, stage, step
from tests.support.clusters import HOST, with_device
from tests.support.practices import runtime
from tests.support.said import refuses
from tests.support.step_traffic import traffic

H100 = Cluster.parse("h100-sxm5-80gb:4x8")
MODEL = CostModel(H100, FP32, "sgd")
CPU = Cluster.parse("cpu:4x4")
F, B = 1e-3, 2e-3
SMALL = {"rows": 8, "width": 8}


def layers(count: int, **changes: object) -> list[BlockCost]:
    return [block(f"layer{i}", **changes) for i in range(count)]


def predict(stages: list[StageCost], mesh: Mesh, *, cluster: Cluster = H100, **how: object) -> Prediction:
    found = CostModel(cluster, FP32, "sgd").predict(stages, step(mesh, **how))
    assert found.breakdown.total_s == pytest.approx(found.step_time_s)
    return found


def test_one_device_adds_up_its_blocks_and_recompute_the_forward_again() -> None:
    found = predict([stage(*layers(6, **SMALL))], Mesh(), count=5)
    assert found.breakdown.compute_s == pytest.approx(5 * 6 * (F + B))
    assert found.step_time_s == pytest.approx(found.breakdown.compute_s + found.breakdown.optimizer_s)
    assert found.stage_times == ((pytest.approx(6 * F), pytest.approx(6 * B)),)
    low, high = found.step_time_interval_s
    assert low < found.step_time_s < high
    assert found.tokens_per_s == pytest.approx(5 * 128 / found.step_time_s)
    peak = H100.devices[0].rate("float32").datasheet_flops_per_s
    assert found.mfu == pytest.approx(5 * 3e9 / found.step_time_s / peak)
    blocks = layers(4, communication_forward_s=1e-4, communication_again_s=1e-4, **SMALL)
    plain, again = (predict([stage(*blocks, recompute=r)], Mesh(), count=2).breakdown for r in ("none", "full"))
    assert (plain.recompute_s, again.recompute_s) == (0, pytest.approx(2 * 4 * F))
    assert again.tensor_parallel_s == pytest.approx(2 * plain.tensor_parallel_s)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_pipeline_of_equal_stages_has_the_known_bubble(schedule: str) -> None:
    pp, count = 4, 8
    stages = [stage(b) for b in layers(pp, sends=(), send_gradients=(), **SMALL)]
    found = predict(stages, Mesh(pp=pp), schedule=schedule, count=count)
    assert found.breakdown.compute_s == pytest.approx(count * (F + B))
    assert (found.breakdown.bubble_s, found.breakdown.pipeline_s) == (pytest.approx((pp - 1) * (F + B)), 0)


def foreign(**does: bool) -> CostModel:
    """The model of H100s for a program that does otherwise than autopar's runtime."""
    return CostModel(H100, FP32, "sgd", runtime=runtime(**does))


def test_messages_between_stages_are_exposed_in_part_and_blocking_ones_are_part_of_the_step() -> None:
    stages = [stage(b) for b in layers(4, sends=(10**7,), send_gradients=(10**7,), **SMALL)]
    far, near = (predict(stages, Mesh(pp=4, dp_replicate=n), schedule="1F1B", count=8).breakdown for n in (8, 1))
    assert far.pipeline_s > near.pipeline_s > 0  # across nodes, then within one
    mesh, count = Mesh(pp=4, tp=8), 8
    how = step(mesh, schedule="1F1B", count=count)
    whole, parts = (foreign(blocking_sends=True, partitioned_sends=p).predict(stages, how) for p in (False, True))
    sent = MODEL.collectives.send_time_s(10**7, mesh)
    # a rank in the middle receives and sends in each of its forwards and backwards, the first one half of that
    assert 2 * count * sent <= whole.breakdown.pipeline_s <= 4 * count * sent
    free = MODEL.predict(stages, how)
    assert whole.step_time_s >= free.step_time_s + 2 * count * sent - free.breakdown.pipeline_s
    gathered = MODEL.collectives.time_s("all_gather", 10**7, mesh, ("tp",))
    part = MODEL.collectives.send_time_s(10**7 / 8, mesh)
    # who receives gathers: a rank in the middle two of its four messages
    assert parts.breakdown.pipeline_s == pytest.approx(whole.breakdown.pipeline_s * (part + gathered / 2) / sent)


def test_gathers_hide_behind_long_blocks_but_where_they_take_the_core() -> None:
    stages = [[stage(*layers(8, forward_s=time_s, backward_s=2 * time_s))] for time_s in (1.0, 0.0)]
    gather = MODEL.collectives.time_s("all_gather", 4 * 2**20, Mesh(dp_shard=8), ("dp_shard",))
    slow_s, fast_s = (predict(own, Mesh(dp_shard=8), zero=3).breakdown.data_parallel_s for own in stages)
    assert slow_s < 4 * (2 + 24 * H100.devices[0].interference) * 4 * gather
    assert fast_s > 4 * 8 * 2 * gather
    slow_s, fast_s = (predict(own, Mesh(dp_shard=4), cluster=CPU, zero=3).breakdown.data_parallel_s for own in stages)
    assert slow_s == pytest.approx(fast_s)


def test_zero_stages_communicate_as_often_as_the_runtime() -> None:
    """Gathers: once, once, twice a micro-batch; reductions: once, every micro-batch, every micro-batch."""
    blocks = [stage(*layers(1, forward_s=0.0, backward_s=0.0))]
    mesh, count = Mesh(dp_shard=4), 8
    found = {z: predict(blocks, mesh, cluster=CPU, zero=z, count=count).breakdown.data_parallel_s for z in (1, 2, 3)}
    model = CostModel(CPU, FP32, "sgd")
    unit = model.of(step(mesh, zero=3)).unit(blocks[0].blocks[0])
    loss = model.collectives.time_s("all_reduce", 4, mesh, ("dp_shard",))
    found = {zero: seconds - loss for zero, seconds in found.items()}
    assert found[1] == pytest.approx(unit.gather_s + unit.reduce_s)
    assert found[2] == pytest.approx(unit.gather_s + count * unit.reduce_s)
    assert found[3] == pytest.approx(count * (2 * unit.gather_s + unit.reduce_s))


def test_gathers_after_the_step_do_not_add_up_along_a_pipeline() -> None:
    """FSDP2 gathers in each stage's first forward, one stage after the other; DeepSpeed and Megatron on all at once."""
    pp, count = 4, 8
    stages = [stage(b) for b in layers(pp, sends=(), send_gradients=())]
    how = step(Mesh(pp=pp, dp_shard=8), schedule="1F1B", count=count, zero=1)
    unit = MODEL.of(how).unit(stages[0].blocks[0])
    first, late = MODEL.predict(stages, how), foreign(gathers_after_step=True).predict(stages, how)
    assert first.step_time_s - late.step_time_s == pytest.approx((pp - 1) * unit.gather_s)
    assert first.breakdown.data_parallel_s == pytest.approx(late.breakdown.data_parallel_s)
    hidden = foreign(gathers_after_step=True, overlapped_reductions=True).predict(stages, how).breakdown
    unhidden = late.breakdown.data_parallel_s - hidden.data_parallel_s
    assert unhidden == pytest.approx((1 - MODEL.device.interference) * (unit.gather_s + unit.reduce_s))


def test_sums_that_every_rank_takes_whole_cost_an_all_reduce() -> None:
    """DeepSpeed's BF16_Optimizer: each rank steps a part, and has summed all of it."""
    models, how = [foreign(all_reduces_sums=a) for a in (False, True)], step(Mesh(dp_shard=8), zero=1)
    stages = [stage(*layers(3))]
    parts, whole = (model.predict(stages, how).breakdown for model in models)
    scattered_s, summed_s = (sum(model.of(how).unit(b).reduce_s for b in stages[0].blocks) for model in models)
    assert summed_s > 1.2 * scattered_s
    assert whole.data_parallel_s > parts.data_parallel_s


def test_parameters_that_their_owners_broadcast_cost_a_ring_each() -> None:
    """InternEvo's ZeRO 1: one collective for each parameter, whose hops grow with the ranks, and no copies."""
    mesh, blocks = Mesh(dp_shard=8), layers(3)
    gathering, sending = (foreign(gathers_after_step=True, broadcasts_parameters=a) for a in (False, True))
    stages, how = [stage(*blocks)], step(mesh, zero=1)
    unit = sending.of(how).unit(stages[0].blocks[0])
    time_s = sending.collectives.time_s
    times = [time_s("broadcast", p.numel * 4, mesh, ("dp_shard",)) for p in blocks[0].parameters if p.shape]
    assert unit.gather_s == pytest.approx(sum(times))
    gathered, broadcast = (model.predict(stages, how).breakdown.data_parallel_s for model in (gathering, sending))
    assert gathered != broadcast
    assert unit.reduce_s == gathering.of(how).unit(stages[0].blocks[0]).reduce_s


def test_adding_gradients_moves_them_for_all_micro_batches_but_the_first_and_of_two_users_for_all() -> None:
    blocks, count = layers(3), 5
    how = step(Mesh(), count=count)
    plain, added = (MODEL.predict([stage(*blocks)], replace(how, adds_gradients=a)) for a in (False, True))
    numel = sum(p.numel for b in blocks for p in b.parameters)
    kernels = sum(len(b.parameters) for b in blocks)
    once = 3 * 4 * numel / MODEL.device.memory_bandwidth_bytes_per_s + kernels * MODEL.device.launch_s
    assert added.step_time_s - plain.step_time_s == pytest.approx((count - 1) * once)
    weight = ParameterCost(name="embedding", shape=(1024, 64), num_bytes=1024 * 64 * 4, shared=True)
    how = replace(step(Mesh(), count=count), adds_gradients=True)
    blocks = [block("first", parameters=(weight,)), *layers(2), block("last", parameters=(weight,))]
    without = [*blocks[:-1], block("last", parameters=())]
    tied, once = (MODEL.predict([stage(*some)], how) for some in (blocks, without))
    each = 3 * 4 * weight.numel / MODEL.device.memory_bandwidth_bytes_per_s + MODEL.device.launch_s
    assert tied.step_time_s - once.step_time_s == pytest.approx(count * each)


def test_actions_and_messages_take_their_time_of_the_cores() -> None:
    """By the engine that runs them: another one where a rank has several stages."""
    times = {"action_s": 1e-3, "message_s": 1e-4, "interleaved_action_s": 3e-3, "interleaved_message_s": 5e-4}
    cluster = with_device(H100, overheads=Overheads(**times, provenance="example"))
    count, sends = 8, {"sends": (1, 1), "send_gradients": (1,)}

    def busy_s(name: str, virtual_stages: int) -> float:
        stages = [stage(b) for b in layers(2 * virtual_stages, **sends, **SMALL)]
        options = {"schedule": name, "count": count}
        plain, found = (predict(stages, Mesh(pp=2), cluster=c, **options).breakdown for c in (H100, cluster))
        assert found.compute_s == plain.compute_s
        return found.pipeline_s - plain.pipeline_s

    # each rank is at one end of every cut; two tensors pass it forward, one backward
    assert busy_s("1F1B", 1) == pytest.approx(count * (2 * 1e-3 + 3 * 1e-4), rel=1e-3)
    assert busy_s("Interleaved1F1B", 2) == pytest.approx(count * (4 * 3e-3 + 3 * 3 * 5e-4), rel=1e-3)
    one_engine = Overheads(action_s=1e-3, provenance="example")  # as of a profile that knows one alone
    assert one_engine.of_actions(2) == (1e-3, 0.0)


def test_gradients_of_whole_parameters_are_summed_over_their_axes_once() -> None:
    blocks = layers(2)
    summed = [replace(b, parameters=tuple(replace(p, gradient_sum_axes=("tp",)) for p in b.parameters)) for b in blocks]
    mesh = Mesh(tp=4)
    plain, more = (predict([stage(*bs)], mesh).breakdown.tensor_parallel_s for bs in (blocks, summed))
    size = 2 * 4 * 2**20  # one bucket, which leaves after the last backward, copied in and out
    copies = 2 * size / MODEL.device.memory_bandwidth_bytes_per_s
    assert more - plain == pytest.approx(MODEL.collectives.time_s("all_reduce", size, mesh, ("tp",)) + copies)


def test_small_buckets_leave_early_and_large_ones_wait_for_fewer_messages() -> None:
    """Three gradients of 4 MiB: one bucket waits for all of them, three leave one by one behind their blocks."""
    mesh, model = Mesh(dp_replicate=4), CostModel(CPU, FP32, "sgd")
    blocks = layers(3)
    one, three = (replace(step(mesh), bucket_bytes=size) for size in (2**40, 1))
    sums = [[c for c in traffic(model, [stage(*blocks)], how)[0] if c.num_bytes >= 4 * 2**20] for how in (one, three)]
    assert [[c.num_bytes for c in found] for found in sums] == [[12 * 2**20], [4 * 2**20]]
    assert traffic(model, [stage(*blocks)], three)[0][sums[1][0]] == 3
    hops = model.collectives.time_s("all_reduce", 12 * 2**20, mesh, ("dp_replicate",))
    copies = 2 * 12 * 2**20 / model.device.memory_bandwidth_bytes_per_s
    loss = model.collectives.time_s("all_reduce", 4, mesh, ("dp_replicate",))
    found = [model.predict([stage(*blocks)], how).breakdown.data_parallel_s for how in (one, three)]
    assert found[0] == pytest.approx(hops + copies + loss)
    each = model.collectives.time_s("all_reduce", 4 * 2**20, mesh, ("dp_replicate",))
    assert each > B
    after = 3 * each - 2 * B
    assert found[1] == pytest.approx(after + model.device.interference * (3 * each - after) + loss)
    memory = [model.memory([stage(*blocks)], how)[0].transient for how in (one, three)]
    assert memory[0] == pytest.approx(12 * 2**20, rel=1e-3)
    assert memory[1] < memory[0]  # a gradient that is alone in its bucket is summed where it lies


def test_copies_of_what_blocks_keep_hide_behind_other_blocks() -> None:
    """1000 bytes: 5 ms down and 4 ms up beside forwards of 1 ms and backwards of 2 ms."""
    host = replace(HOST, to_host_bytes_per_s=2e5, to_device_bytes_per_s=2.5e5, latency_s=0.0, launch_s=0.0)
    cluster = with_device(CPU, host=host)
    blocks = layers(8, **SMALL)

    def waits_s(*moved: int, count: int = 3) -> float:
        some = [replace(b, offloads=i in moved) for i, b in enumerate(blocks)]
        found = predict([stage(*some)], Mesh(), cluster=cluster, count=count)
        plain = predict([stage(*blocks)], Mesh(), cluster=cluster, count=count)
        assert found.step_time_s - plain.step_time_s == pytest.approx(found.breakdown.offload_s)
        assert found.memory[0].host == 1000 * len(moved)
        assert found.memory[0].activations == plain.memory[0].activations - 1000 * len(moved)
        return found.breakdown.offload_s / count

    assert waits_s() == 0
    assert waits_s(3) == pytest.approx(4e-3)  # 8 forwards until it moves again; nothing to bring it up beside
    assert waits_s(0, 1) == pytest.approx((5e-3 - F) + (4e-3 - B) + 4e-3)  # 7 forwards hide the second one
    assert waits_s(0, 2, 4, 6) == pytest.approx(3 * (5e-3 - 2 * F) + (5e-3 - 2 * F) + 4e-3)
    said = r"the profile of cpu has no link to it\. Pin offload=none, or add \[device.host\]"
    refuses(UsageError, said, predict, [stage(replace(blocks[0], offloads=True))], Mesh(), cluster=CPU)


def test_tied_weights_are_summed_between_the_ends_of_the_pipeline() -> None:
    first, last = layers(2, sends=(), send_gradients=())
    tied = replace(first.parameters[0], shared=True)
    stages = [stage(replace(first, parameters=(tied,))), stage(replace(last, parameters=(tied,)))]
    mesh = Mesh(pp=2)
    with_tie = predict(stages, mesh, schedule="1F1B").breakdown.data_parallel_s
    tie, loss = (MODEL.collectives.time_s("all_reduce", size, mesh, ("pp",)) for size in (4 * 2**20, 4))
    assert with_tie == pytest.approx(tie + loss)


def test_impossible_stages_are_refused() -> None:
    said = "pipeline of 2 ranks cannot have 1 stages"
    refuses(UsageError, said, predict, [stage(block())], Mesh(pp=2), schedule="1F1B")


@given(
    st.sampled_from([Mesh(dp_shard=8), Mesh(dp_replicate=8), Mesh(dp_replicate=4, dp_shard=8), Mesh(pp=2, dp_shard=8)]),
    st.integers(0, 3), st.floats(1.0, 8.0), st.floats(0, 1e-2),
)  # fmt: skip
def test_faster_links_never_make_a_slower_step(mesh: Mesh, zero: int, factor: float, forward_s: float) -> None:
    zero = zero if mesh.dp_shard > 1 else 0
    better = scaled(H100, {"link.bandwidth": factor})
    stages = [stage(*layers(2, forward_s=forward_s)) for _ in range(mesh.pp)]
    schedule = "1F1B" if mesh.pp > 1 else "none"
    slow, fast = (predict(stages, mesh, cluster=c, schedule=schedule, zero=zero).step_time_s for c in (H100, better))
    assert fast <= slow * (1 + 1e-9)


@given(st.floats(0, 1e-2), st.floats(0, 1e-2), st.sampled_from([0, 3]), st.sampled_from(["none", "full"]))
def test_longer_blocks_never_make_a_faster_step(forward_s: float, more: float, zero: int, recompute: Recompute) -> None:
    mesh = Mesh(dp_shard=8) if zero else Mesh(dp_replicate=8)
    short, long = (
        predict([stage(*layers(3, forward_s=seconds), recompute=recompute)], mesh, zero=zero).step_time_s
        for seconds in (forward_s, forward_s + more)
    )
    assert long >= short * (1 - 1e-9)
