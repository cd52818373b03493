from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autopar import api
from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.runtime.data import PlannedLoader, planned_loader
from autopar.runtime.step.other_runs import BatchSizes, WholeBatch
from tests.support.clusters import two_kinds
from tests.support.planner.graphs import mlp
from tests.support.said import refuses


def numbers(length: int) -> Any:
    return [{"x": torch.tensor(i)} for i in range(length)]


def plan_of(*pins: str, ranks: int) -> Plan:
    return api.estimate(mlp(layers=2), cluster=f"cpu:1x{ranks}", global_batch_size=8, pins=pins)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    unequal = ["data_shares=3-1", "zero=1", "dp_replicate=1"]
    return {
        "one": plan_of(ranks=1), "dp2": plan_of("dp=2", ranks=2), "dp4": plan_of("dp=4", ranks=4),
        "tp2 x dp2": plan_of("tp=2", "dp=2", ranks=4),
        "unequal": api.estimate(mlp(layers=2), cluster=two_kinds(2, 2), global_batch_size=8, pins=unequal),
    }  # fmt: skip


def loaders(plan: Plan, length: int = 27, make: Any = numbers, **options: Any) -> list[PlannedLoader]:
    return [planned_loader(plan, rank, make(length), **options) for rank in range(plan.mesh.data)]


def together(batches: list[Any]) -> list[int]:
    if isinstance(batches[0], WholeBatch):
        assert all(batch["x"].tolist() == batches[0]["x"].tolist() for batch in batches)
        return list(batches[0]["x"].tolist())
    return [number for batch in batches for number in batch["x"].tolist()]


def epoch(made: list[PlannedLoader]) -> list[list[int]]:
    return [together(list(batches)) for batches in zip(*made, strict=True)]


def test_epochs_have_an_order_each_and_every_sample_once(plans: dict[str, Plan]) -> None:
    (loader,) = loaders(plans["one"], seed=3)
    epochs = [[n for batch in loader for n in batch["x"].tolist()] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(27))
    loader.set_epoch(0)
    assert [n for batch in loader for n in batch["x"].tolist()] == epochs[0]
    loader.set_epoch(0)
    assert [next(iter(loader))["x"].tolist() for _ in range(2)] == [epochs[0][:8]] * 2, "what was left is begun anew"
    (other,) = loaders(plans["one"], seed=4)
    assert [n for batch in other for n in batch["x"].tolist()] != epochs[0]


def test_what_is_left_out_and_not_shuffled(plans: dict[str, Plan]) -> None:
    made = loaders(plans["dp2"], shuffle=False, drop_last=True)
    assert epoch(made) == [list(range(start, start + 8)) for start in (0, 8, 16)]
    assert [len(loader) for loader in made] == [3, 3]
    assert epoch(loaders(plans["dp2"], batch_size=6, shuffle=False))[-1] == [24, 25, 26]
    larger = replace(plans["dp2"], global_batch_size=16)
    assert [len(batch) for batch in epoch(loaders(larger))] == [16, 11]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["one", "dp4", "tp2 x dp2", "unequal"])
def test_an_epoch_goes_on_under_another_plan(plans: dict[str, Plan], name: str, workers: int) -> None:
    (undisturbed,) = loaders(plans["one"], seed=5)
    wanted = [epoch([undisturbed]) for _ in range(3)]
    before = loaders(plans["dp2"], seed=5)
    assert epoch(before) == wanted[0]
    running = [iter(loader) for loader in before]
    assert [together([next(one) for one in running]) for _ in range(2)] == wanted[1][:2]
    states = [loader.state_dict() for loader in before]
    assert states[0] == states[1] == {"epoch": 1, "samples": 16, "num_samples": 27}

    after = loaders(plans[name], seed=5, num_workers=workers)
    for loader in after:
        loader.load_state_dict(states[0])
        loader.set_epoch(1)
    assert [loader.state_dict() for loader in after] == [states[0]] * len(after)
    assert epoch(after) == wanted[1][2:]
    assert len(next(iter(after[0]))["x"]) == len(plans[name].samples_of(0))
    assert epoch(after) == wanted[2]
    assert list(map(len, wanted[2])) == [8, 8, 8, 3]


def test_a_last_batch_as_large_as_a_share_is_known_as_whole(plans: dict[str, Plan]) -> None:
    """By its size it could be this rank's own part of a complete one."""
    plan = plans["dp2"]
    last = [list(loader)[-1] for loader in loaders(plan, length=12)]
    assert [len(batch["x"]) for batch in last] == [4, 4]
    assert isinstance(last[0], WholeBatch)
    sizes = BatchSizes(plan, 0, lambda _: True)
    assert not sizes.is_partial(dict(last[0]), 4, "train_step")
    assert sizes.is_partial(last[0], 4, "train_step")


class Stream(IterableDataset[dict[str, Tensor]]):
    """Gives each worker process other samples, as streams are told to."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return ({"x": torch.tensor(100 * self.epoch + i)} for i in range(first, self.length, step))


streams = partial(loaders, make=Stream)


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in ("one", "dp2", "dp4", "tp2 x dp2", "unequal")), ("dp2", 2)]
)
def test_a_stream_is_divided_under_any_plan(plans: dict[str, Plan], name: str, workers: int) -> None:
    """Also where an epoch is begun in its middle, at a position of another plan's loader."""
    made = streams(plans[name], num_workers=workers)
    first = [together(list(batches)) for batches in zip(*made, strict=True)]
    assert first == [list(range(i, min(i + 8, 27))) for i in range(0, 27, 8)]
    (alone,) = streams(plans["one"])
    alone.set_epoch(1)
    iterator = iter(alone)
    for _ in range(2):
        next(iterator)
    assert alone.state_dict() == {"epoch": 1, "samples": 16}
    for loader in made:
        loader.load_state_dict(alone.state_dict())
        loader.set_epoch(1)
    rest = [together(list(batches)) for batches in zip(*made, strict=True)]
    assert rest == [list(range(116, 124)), list(range(124, 127))]
    assert {tuple(loader.state_dict().items()) for loader in made} == {(("epoch", 2), ("samples", 0))}


def test_a_stream_without_its_rest_and_one_that_is_no_dataset(plans: dict[str, Plan]) -> None:
    assert [len(batch["x"]) for batch in streams(plans["dp2"], drop_last=True)[0]] == [4, 4, 4]
    plain = planned_loader(plans["dp2"], 1, iter(numbers(8)))
    assert [batch["x"].tolist() for batch in plain] == [[4, 5, 6, 7]]
    refuses(TypeError, "has no len", len, plain)


def test_what_cannot_be_loaded_is_refused(plans: dict[str, Plan]) -> None:
    options: dict[str, Any]
    for make, options, said in (
        (streams, {"shuffle": True}, "Stream is a stream of samples, which has an order already"),
        (streams, {"num_workers": 1, "persistent_workers": True}, "persistent_workers=True is not supported"),
        (loaders, {"batch_size": -1}, r"The number batch_size is -1.*at least 1"),
        (loaders, {"drop_last": "no"}, "drop_last is 'no'. Write drop_last=True or drop_last=False"),
        (loaders, {"shuffle": "no"}, "shuffle is 'no'"),
        (loaders, {"seed": 1.5}, "The seed is 1.5"),
        (loaders, {"batch_size": 0}, "The number batch_size is 0"),
        (loaders, {"batch_size": 16}, r"A batch of 16 samples is larger than that of the plan \(8\)"),
    ):
        refuses(UsageError, said, make, plans["dp2"], **options)
    for given in (None, DataLoader([1])):
        said = rf"The dataset of par.dataloader is a {type(given).__name__}"
        refuses(UsageError, said, planned_loader, plans["one"], 0, given)
    (loader,), state = loaders(plans["one"]), {"epoch": 0, "samples": 8, "num_samples": 30}
    refuses(UsageError, "Expected 30 samples, got 27", loader.load_state_dict, state)


def test_a_batch_that_cannot_be_computed_is_refused_at_once(plans: dict[str, Plan]) -> None:
    def refuse(size: int) -> None:
        raise UsageError(f"no {size}")

    refuses(UsageError, "no 3", loaders, plans["dp2"], check_smaller=refuse)
    refuses(UsageError, "no 4", loaders, plans["dp2"], batch_size=4, length=24, check_smaller=refuse)
    assert loaders(plans["dp2"], length=24, check_smaller=refuse)
    assert isinstance(loaders(plans["dp2"])[0], DataLoader)


def test_the_model_makes_a_loader_and_knows_which_batches_it_can_compute() -> None:
    batch, rows = {"input": torch.randn(4, 4)}, [{"input": torch.full((4,), float(i))} for i in range(10)]
    parts = {"loss_fn": lambda output, _: output.square().mean(), "cluster": "cpu:1x1", "example_inputs": batch}
    par = api.parallelize(nn.Linear(4, 4), **parts)
    assert [len(par_batch["input"]) for par_batch in par.dataloader(rows, num_workers=0)] == [4, 4, 2]
    for found in par.dataloader(rows):
        assert par.evaluate(found).isfinite()
    meeting = api.parallelize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **parts)
    said = r"A batch of 3 samples is smaller .* samples of this model meet.*drop_last=True"
    refuses(UsageError, said, meeting.dataloader, rows, batch_size=3)
    assert meeting.train_step([*meeting.dataloader(rows)][-1]).isfinite()
    meeting.eval()
    assert all(meeting.evaluate(found).isfinite() for found in meeting.dataloader(rows, batch_size=3))
