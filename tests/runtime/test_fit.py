import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore

import autopar
from autopar import api
from autopar.errors import NonFiniteError, OutOfMemoryError, RankFailedError, UsageError
from autopar.plan.plan import FP16, FP32, FP64, Precision, PrecisionName
from autopar.runtime.fit import MAX_SKIPPED, StepDone
from autopar.runtime.job import fresh
from autopar.runtime.parallel_model import ParallelModel
from tests.support.close import assert_close
from tests.support.parallel import alone, on_rank
from tests.support.said import refuses
from tests.support.small_models import model_of

pytestmark = pytest.mark.usefixtures("one_rank")


def net() -> nn.Module:
    torch.manual_seed(0)
    forward = lambda self, x: (self.last(self.drop(self.first(x).relu())) - x).square().mean()
    return model_of(forward, first=nn.Linear(8, 16), last=nn.Linear(16, 8), drop=nn.Dropout(0.2))


def batches(count: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 8, generator=generator)} for _ in range(count)]


@cache
def traced(precision: PrecisionName = "fp32") -> Any:
    return api.trace(net(), example_inputs=batches()[0], precision=precision)


def job(precision: Precision = FP32) -> tuple[ParallelModel, torch.optim.Optimizer, Any]:
    par = alone(net(), traced(precision.name), micro=2, precision=precision)
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.05)
    return par, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class Loader:
    """Counts what it gives, as loaders with a state do."""

    def __init__(self, data: list[dict[str, Tensor]]) -> None:
        self.data, self.next, self.epochs = data, 0, list[int]()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.next < len(self.data):
            self.next += 1
            yield self.data[self.next - 1]
        self.next = 0

    def set_epoch(self, number: int) -> None:
        self.epochs.append(number)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def of_the_plan(par: ParallelModel) -> Any:
    """Epochs of two batches and a smaller one, of which steps take two each."""
    return par.dataloader([{"x": one} for batch in batches(3) for one in batch["x"]][:10], seed=3)


@pytest.mark.parametrize(("make", "accumulate", "asynchronous"), [
    *((lambda _: batches(), 1, asynchronous) for asynchronous in (False, True)),
    *((lambda _: Loader(batches()), 1, asynchronous) for asynchronous in (False, True)),
    (of_the_plan, 2, False),
], ids=["list", "list beside", "loader", "loader beside", "of the plan"])  # fmt: skip
def test_a_run_in_parts_is_as_one(tmp_path: Path, make: Any, accumulate: int, asynchronous: bool) -> None:
    wanted = list[StepDone]()
    par, optimizer, scheduler = job()
    loader, more = make(par), {"accumulate": accumulate}
    assert autopar.fit(par, optimizer, loader, steps=9, scheduler=scheduler, on_step=wanted.append, **more) == 9
    assert getattr(loader, "epochs", [0, 1]) == [0, 1], "a loader is told of its epochs"
    found, parts = list[StepDone](), list[ParallelModel]()
    for steps in (2, 7, 7, 9):
        one, own, rates = job()
        checkpoints = autopar.Checkpoints(tmp_path, keep=2, asynchronous=asynchronous)
        more |= {"steps": steps, "scheduler": rates, "save_every": 3, "checkpoints": checkpoints}
        assert autopar.fit(one, own, make(one), on_step=found.append, **more) == steps
        parts.append(one)
    assert found == wanted
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{n * accumulate:08d}" for n in (7, 9)]
    assert_close(par.full_state_dict(), parts[-1].full_state_dict(), 0.0)


def test_several_batches_make_one_step_of_their_mean() -> None:
    par, optimizer, _ = job(FP64)
    done = list[StepDone]()
    autopar.fit(par, optimizer, batches(3), steps=2, accumulate=3, max_norm=0.1, on_step=done.append)
    other, own, _ = job(FP64)
    norms = []
    for _ in range(2):
        for batch in batches(3):
            other.train_step(batch)
        for parameter in other.parameters():
            parameter.grad /= 3
        norms.append(other.clip_grad_norm_(0.1).item())
        own.step()
        own.zero_grad()
    assert [one.grad_norm for one in done] == pytest.approx(norms)
    assert_close(par.full_state_dict(), other.full_state_dict())


def test_a_step_that_is_not_finite_stops_training_and_names_parameters(tmp_path: Path) -> None:
    par, optimizer, _ = job()
    data = batches(3)
    data[2]["x"][0, 0] = math.inf
    checkpoints = autopar.Checkpoints(tmp_path)
    said = r"at step 3: a loss of \S+, no finite gradient of first.bias.*Lower"
    with pytest.raises(NonFiniteError, match=said) as caught:
        autopar.fit(par, optimizer, data, steps=9, save_every=1, checkpoints=checkpoints)
    assert "\n" not in str(caught.value)
    assert all(value.isfinite().all() for value in par.full_state_dict().values())
    assert checkpoints.latest() == tmp_path / "step-00000002"


def test_steps_that_are_not_finite_are_skipped_but_not_forever() -> None:
    par, optimizer, scheduler = job()
    data = batches(4)
    data[1]["x"][0, 0] = math.nan
    done = list[StepDone]()
    more = {"scheduler": scheduler, "max_norm": 1.0, "on_non_finite": "skip"}
    autopar.fit(par, optimizer, data, steps=5, on_step=done.append, **more)
    assert [one.is_skipped for one in done] == [False, True, False, False, False]
    assert all(value.isfinite().all() for value in par.full_state_dict().values())
    other, own, rates = job()
    bad = [data[1]]
    with pytest.raises(NonFiniteError, match=rf"in {MAX_SKIPPED + 1} steps in a row, at step {MAX_SKIPPED + 1}"):
        autopar.fit(other, own, bad, steps=50, scheduler=rates, on_non_finite="skip")
    autopar.fit(other, own, bad, steps=2, on_non_finite="ignore")
    assert any(value.isnan().any() for value in other.full_state_dict().values())


def test_a_scaler_skips_by_itself() -> None:
    par, optimizer, _ = job(FP16)
    data = batches(3)
    data[1]["x"][0, 0] = math.inf
    done = list[StepDone]()
    autopar.fit(par, optimizer, data, steps=3, max_norm=1.0, on_step=done.append)
    assert done[1].is_skipped and not done[2].is_skipped
    assert all(value.isfinite().all() for value in par.full_state_dict().values())


def test_sigterm_saves_and_ends_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    par, optimizer, _ = job()

    def told(done: StepDone) -> None:
        if done.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        autopar.fit(par, optimizer, batches(), steps=10**6, checkpoints=autopar.Checkpoints(tmp_path), on_step=told)
    assert caught.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: training ends after step 1, which is saved in" in caplog.text
    assert autopar.Checkpoints(tmp_path).latest() == tmp_path / "step-00000001"


@pytest.mark.parametrize(("data", "options", "text"), [
    (batches(), {"steps": 0}, r"The number steps is 0\. Give a whole number, at least 1"),
    (batches(), {"steps": "9"}, "The number steps is '9'"),
    (batches(), {"max_norm": "1"}, "The max_norm is '1'"),
    (batches(), {"max_norm": -1}, "The max_norm is -1"),
    (batches(), {"scheduler": 3}, "The scheduler of fit is a int"),
    (batches(), {"checkpoints": "runs"}, "The checkpoints of fit is a str. Give autopar.Checkpoints"),
    (batches(), {"on_step": 3}, "The on_step of fit is a int"),
    (3, {}, "The batches of fit is a int"),
    (batches(), {"save_every": 0}, "save_every is 0"),
    (batches(), {"accumulate": -1}, "accumulate is -1"),
    (batches(), {"on_non_finite": "raise"}, "on_non_finite.*'raise'.*stop, skip or ignore"),
    ([], {}, "There is no batch to train on"),
    (iter(batches(2)), {"steps": 3}, "no batch to train on. Give batches that can be gone through more than once"),
])  # fmt: skip
def test_what_cannot_be_trained_with_is_refused(data: Any, options: dict[str, Any], text: str) -> None:
    par, optimizer, _ = job()
    refuses(UsageError, text, autopar.fit, par, optimizer, data, **{"steps": 1, **options})


def test_a_model_and_an_optimizer_that_do_not_belong_together_are_refused() -> None:
    par, optimizer, _ = job()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    other: Any
    for model, other, scheduler, text in (
        (net(), optimizer, None, r"The model of fit is a Model. Pass what autopar.parallelize"),
        (par, None, None, "The optimizer of fit is a NoneType"),
        (par, torch.optim.SGD(net().parameters()), None, "The optimizer has no parameter of this model"),
        (par, optimizer, plateau, r"ReduceLROnPlateau. Give one whose step\(\) takes nothing"),
    ):
        refuses(UsageError, text, autopar.fit, model, other, batches(), steps=1, scheduler=scheduler)


def test_out_of_memory_says_what_was_planned_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = api.estimate(traced(), cluster="cpu:1x1", global_batch_size=4, pins=["micro_batch=2", "recompute=none"])
    par = on_rank(net(), plan, traced())
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.05)
    autopar.fit(par, optimizer, batches(), steps=1)

    def fails(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(par._runner, "run", fails)
    said = r"Rank 0 ran out of memory on cpu: parameters 1.09 KiB \(predicted "
    caught = refuses(OutOfMemoryError, said, par.train_step, batches()[0])
    text = str(caught)
    assert "gradients 0 B (predicted" in text
    assert "optimizer states 2.2 KiB (predicted" in text
    assert text.endswith("Search a plan that needs less: pin recompute=full or micro_batch=1.")
    monkeypatch.undo()
    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    refuses(OutOfMemoryError, "ran out of memory", autopar.fit, par, optimizer, batches(), steps=2)


def test_starts_of_a_job_share_nothing_in_its_store() -> None:
    """The names that the ranks of a killed start have left are there, and no rank of the next one takes them."""
    store = HashStore()
    for number, size in enumerate((3, 3, 2, 4)):
        with ThreadPoolExecutor(size) as threads:
            meet = partial(fresh, PrefixStore("job", store), timeout_s=20.0)
            found = list(threads.map(meet, reversed(range(size)), [size] * size))
        found[0].set("place", str(number))
        assert {one.get("place").decode() for one in found} == {str(number)}
    refuses(RankFailedError, "Some rank did not come", fresh, PrefixStore("alone", store), 0, 2, timeout_s=0.1)


def test_checkpoints_of_a_loop_of_ones_own_are_told_from_those_of_fit(tmp_path: Path) -> None:
    par, optimizer, _ = job()
    checkpoints = autopar.Checkpoints(tmp_path)
    checkpoints.save(par, optimizer, extra={"epoch": 3})
    with pytest.raises(UsageError, match=r"was not saved by autopar\.fit.*Name another folder"):
        autopar.fit(par, optimizer, batches(), steps=1, checkpoints=checkpoints)
