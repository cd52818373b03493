import json
import math
import pickle
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as rates

from autopar.errors import CheckpointError, PlanError, UsageError
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.checkpoint import checkpoint_index, write
from autopar.runtime.checkpoint.checkpoint_index import NAME, chunk_rows
from autopar.runtime.checkpoint.contents import Part
from autopar.runtime.checkpoint.load import Folder
from autopar.runtime.checkpoint.series import Checkpoints
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.trace import trace
from tests.support.damage import KINDS, Touch, damage
from tests.support.distributed.checkpoints import Position
from tests.support.distributed.jobs import steps
from tests.support.distributed.plans import make_plan
from tests.support.parallel import halve, on_rank, small
from tests.support.said import refuses, said

pytestmark = pytest.mark.usefixtures("one_rank")


class Net(nn.Module):
    """With what a plan leaves out: a parameter that no loss uses, buffers that no step changes, and one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("shift", torch.randn(16))
        self.register_buffer("note", torch.arange(3))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("hidden", torch.randn(16), persistent=False)
        self.again = self.shift

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.steps += 1
        return {"loss": self.last(self.first(x).relu() + self.shift + self.hidden).square().mean()}


def batch(seed: int = 0, size: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))}


@cache
def graph() -> Any:
    return trace(Net(), kwargs=batch(size=2), name="net")


def build(model: nn.Module | None = None) -> ParallelModel:
    plan = make_plan(graph(), Mesh(), global_batch_size=8, micro_batch_size=8)
    return on_rank(model or Net(), plan, graph(), seed=3)


def trained(count: int = 1) -> tuple[ParallelModel, torch.optim.Optimizer]:
    par = build()
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.1)
    steps(par, optimizer, [batch(seed) for seed in range(count)])
    return par, optimizer


def values(par: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(par.full_state_dict())
    for key, parameter in par.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} {name}"] = getattr(value, "full_tensor", lambda value=value: value)().clone()
    return found


def loaded_values(path: Path) -> dict[str, Tensor]:
    par = build()
    optimizer = torch.optim.AdamW(par.parameters())
    par.load(path, optimizer)
    return values(par, optimizer)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_state_dict_is_complete_and_so_is_a_checkpoint(tmp_path: Path) -> None:
    par, optimizer = trained()
    mine, other = Net(), Net()
    assert list(par.full_state_dict()) == list(mine.state_dict())
    mine.load_state_dict(par.full_state_dict())
    assert mine.steps == 1
    par.save(tmp_path / "run", optimizer)
    with torch.no_grad():
        for tensor in (*other.parameters(), other.shift, other.note):
            tensor.mul_(2)
    loaded, again = build(other), build(other)
    loaded.load(tmp_path / "run", torch.optim.AdamW(loaded.parameters()))
    assert same(loaded.full_state_dict(), par.full_state_dict())
    assert torch.equal(other.shift, 2 * Net().shift), "the user's model is as it was"
    again.load_state_dict(par.full_state_dict())
    assert same(again.full_state_dict(), par.full_state_dict())
    assert loaded.train_step(batch(5)).item() == par.train_step(batch(5)).item(), "steps read buffers as loaded"


def test_the_files_are_json_and_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    par, optimizer = trained()
    par.save(tmp_path / "run", optimizer)
    assert Plan.load(tmp_path / "run" / "plan.json") == par.plan
    index = json.loads((tmp_path / "run" / NAME).read_text())
    assert (index["format"], index["version"]) == ("autopar checkpoint", 1)
    assert Plan.from_dict(index["values"]["plan"]) == par.plan
    with safe_open(tmp_path / "run" / "data-0-00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("model.first.weight"), par.full_state_dict()["first.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: rates.CosineAnnealingLR(o, 10),
    "milestones": lambda o: rates.MultiStepLR(o, [1, 4, 4]),
    "one cycle": lambda o: rates.OneCycleLR(o, 0.3, 10),
    "two in a row": lambda o: rates.SequentialLR(o, [rates.LinearLR(o), rates.CosineAnnealingLR(o, 5)], [2]),
    "plateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
    "a list": lambda o: [rates.CosineAnnealingLR(o, 10), rates.MultiStepLR(o, [2])],
}


def _advance(scheduler: Any) -> None:
    for one in scheduler if isinstance(scheduler, list) else [scheduler]:
        one.step(1.0) if isinstance(one, rates.ReduceLROnPlateau) else one.step()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on(tmp_path: Path, kind: str) -> None:
    def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        return [(optimizer.step(), _advance(scheduler), optimizer.param_groups[0]["lr"])[-1] for _ in range(steps)]

    found = list[list[float]]()
    for loads in (False, True):
        par = build()
        optimizer = torch.optim.SGD(par.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[kind](optimizer)
        if not loads:
            rates_of(optimizer, scheduler, 2)
        (par.load if loads else par.save)(tmp_path / "run", optimizer, scheduler=scheduler)
        found.append(rates_of(optimizer, scheduler, 4))
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


def test_loaders_and_extras_come_back_as_they_were(tmp_path: Path) -> None:
    par = build()
    state = {
        "epoch": 2, 7: ("a", None), "order": torch.randperm(9), "bytes": b"\x00\xff", "array": np.arange(4.0),
        "none": torch.empty(0, 3), "$x": math.inf,
    }  # fmt: skip
    extra = {"best": {"loss": 0.1 + 0.2, "step": 3}, "names": ["a", True, None]}
    par.save(tmp_path, dataloader=Position(state), extra=extra)
    found = Position()
    assert par.load(tmp_path, dataloader=found) == extra
    assert found.state.keys() == state.keys()
    for name in ("order", "none"):
        assert torch.equal(found.state.pop(name), state.pop(name))
    array = found.state.pop("array")
    assert isinstance(array, np.ndarray)
    assert array.tolist() == state.pop("array").tolist()
    assert found.state == state
    wrong, said = Position({"f": [1, same]}), r"cannot hold the function in the state of the dataloader\.f\[1\]"
    refuses(UsageError, said, par.save, tmp_path, dataloader=wrong)
    refuses(UsageError, "The scheduler is a int, which has no state_dict", par.save, tmp_path, scheduler=3)
    refuses(PlanError, "has no state of a scheduler.*without scheduler=", par.load, tmp_path, scheduler=Position())
    refuses(PlanError, "The checkpoint is of another model", small().load, tmp_path)
    assert par.load(tmp_path) == extra


def test_generators_go_on(tmp_path: Path) -> None:
    draw = lambda: (random.random(), np.random.rand(), torch.rand(()).item())
    par = build()
    par.save(tmp_path)
    wanted = draw()
    assert draw() != wanted
    par.load(tmp_path)
    assert draw() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_by_name_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    par, optimizer = trained()
    par.save(tmp_path / "run", optimizer)
    wanted = values(par, optimizer)
    steps(par, optimizer, [batch()])
    par.save(tmp_path / "other", optimizer)
    par.load(tmp_path / "other", optimizer)
    before, refused = values(par, optimizer), 0
    for seed in range(KINDS.index(kind), 12 * len(KINDS), len(KINDS)):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        _, what = damage(tmp_path / "copy", tmp_path / "other", seed)
        text = said(CheckpointError, par.load, tmp_path / "copy", optimizer)
        if text:
            refused += 1
            assert any(part in text for part in (*what.split(), NAME)), (what, text)
            assert "load an earlier checkpoint" in text or "Name a folder" in text
            assert same(values(par, optimizer), before)
        else:
            assert same(values(par, optimizer), wanted), what
            par.load(tmp_path / "other", optimizer)
    assert refused >= 4


def test_no_file_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    par, optimizer = trained()
    par.save(tmp_path / "run", optimizer)
    made = tmp_path / "made"
    pickle.loads(pickle.dumps(Touch(made)))
    made.rmdir()  # the forgery would run
    for forged in ("checkpoint.json", "plan.json", "data-0-00000.safetensors", ".metadata"):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "copy" / forged).write_bytes(pickle.dumps(Touch(made)))
        text = said(CheckpointError, par.load, tmp_path / "copy", optimizer)
        assert text == "" or forged in text
        assert not made.exists()
    (tmp_path / "copy" / "checkpoint.json").unlink()  # beside the forgery of what torch.distributed.checkpoint writes
    refuses(CheckpointError, r"\.metadata, which torch", par.load, tmp_path / "copy", optimizer)
    assert not made.exists()
    for reader in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, reader, None)
    monkeypatch.setattr(torch, "load", None)
    par.load(tmp_path / "run", optimizer)


@pytest.mark.parametrize(("old", "new"), [
    ('"format":"autopar checkpoint"', '"format":"autopar checkpoints"'),
    ('"version":1', '"version":2'),
    ("data-0-00000.safetensors", "../data-0-00000.safetensor"),
    ('"float32"', '"nn"'),
    ('"seed":3', '"sead":3'),
    (",[[0,", ",[[7,"),
    (",[[0,", ",[[0,-"),
])  # fmt: skip
def test_an_index_that_is_forged_with_its_checksum_is_refused(tmp_path: Path, old: str, new: str) -> None:
    par, _ = trained()
    par.save(tmp_path)
    text = (tmp_path / NAME).read_text().partition("\n")[2]
    assert old in text
    from hashlib import sha256

    text = text.replace(old, new)
    (tmp_path / NAME).write_text(f'{{"sha256": "{sha256(text.encode()).hexdigest()}",\n{text}')
    refuses(CheckpointError, "Cannot read the checkpoint", par.load, tmp_path)


def test_a_state_that_nobody_wrote_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\$eval' is no kind"):
        checkpoint_index.decode_state({"$eval": "1"}, lambda name: torch.ones(1))


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "bool", "int8", "complex64", "float8_e4m3fn"])
def test_large_tensors_are_read_by_chunks(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = getattr(torch, kind)
    monkeypatch.setattr("autopar.runtime.checkpoint.checkpoint_index.CHUNK_BYTES", 256)
    value = (torch.randn(37, 5) * 3).to(dtype)
    part = Part(name="x", whole=(37, 5), offset=(0, 0), value=value)
    written, entries = write.write_parts(tmp_path / "data-0-00000.safetensors", [part], {})
    (piece,), each = entries["x"].pieces, chunk_rows((37, 5), dtype.itemsize)
    assert len(piece.sums) == -(-37 // each) > 1 or dtype.itemsize == 1
    values = {"progress": {"step": 0, "seed": 0}, "optimizer": {"settings": [], "of": {}, "numbers": {}}, "states": {}}
    index = checkpoint_index.Index(files={written.name: written}, tensors=entries, values=values)
    (tmp_path / checkpoint_index.NAME).write_bytes(checkpoint_index.encode(index))
    reader = Folder(tmp_path)
    found = torch.cat([rows.view(torch.uint8) for _, rows in reader.rows("x", piece, 11, 30)])
    assert torch.equal(found, value[11:30].contiguous().view(torch.uint8))
    content = bytearray((tmp_path / written.name).read_bytes())
    content[-1] ^= 1
    (tmp_path / written.name).write_bytes(content)
    reader = Folder(tmp_path)
    if dtype.itemsize > 1:
        list(reader.rows("x", piece, 0, each))  # another chunk is damaged
    refuses(CheckpointError, r"x is not what was written \(rows \d+ to 36 of", list, reader.rows("x", piece, 30, 37))


class Killed(BaseException):
    """As a signal: nothing that runs after it is to tidy up."""


@pytest.mark.parametrize("where", ["write_parts", "write_synced", "commit", "_sync"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_killed_save_leaves_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, replaces: bool) -> None:
    par, optimizer = trained()
    checkpoints = Checkpoints(tmp_path)
    kept = checkpoints.save(par, optimizer)
    wanted = values(par, optimizer)
    if not replaces:
        steps(par, optimizer, [batch()])
    halve(par)
    for after in range(3):  # at its first, second, third call
        calls = []
        original = getattr(write, where)

        def killed(*args: Any, after: int = after, calls: list[int] = calls, original: Any = original) -> Any:
            calls.append(1)
            if len(calls) > after:
                raise Killed
            return original(*args)

        with monkeypatch.context() as patched:
            patched.setattr(f"autopar.runtime.checkpoint.write.{where}", killed)
            try:
                checkpoints.save(par, optimizer)
            except Killed:
                found = Checkpoints(tmp_path).latest()
                there = loaded_values(found)
                if found == kept and not (where == "_sync" and after):  # the index is in place before the last
                    assert same(there, wanted)
    final = checkpoints.save(par, optimizer)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, final.name}, "nothing is left of the others"
    assert len(list(final.iterdir())) == 3
    assert same(loaded_values(final), values(par, optimizer))


def test_the_newest_are_kept_and_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    par, optimizer = trained(0)
    checkpoints = Checkpoints(tmp_path / "runs", keep=2)
    assert checkpoints.latest() is None
    assert checkpoints.load(par, optimizer) is None
    for n in range(4):
        steps(par, optimizer, [batch()])
        checkpoints.save(par, optimizer, extra={"n": n})
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["step-00000003", "step-00000004"]
    newest = checkpoints.latest()
    assert newest.name == "step-00000004"
    file = newest / "data-0-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 16
    file.write_bytes(content)
    loaded = build()
    again = Checkpoints(tmp_path / "runs", keep=2)
    assert again.load(loaded, torch.optim.AdamW(loaded.parameters())) == 3
    assert again.extra == {"n": 2}
    assert "step-00000004 is damaged" in caplog.text
    (tmp_path / "runs" / "step-00000003" / NAME).unlink()
    last = Checkpoints(tmp_path / "runs")
    refuses(CheckpointError, r"damaged.*No checkpoint in .* can be loaded", last.load, loaded)
    refuses(UsageError, "The model of a checkpoint is a int", last.save, 3)
    said = r"asynchronous is 'no'\. Write asynchronous=True or asynchronous=False"
    refuses(UsageError, said, Checkpoints, tmp_path, asynchronous="no")
    for keep in (0, 1.5, "a", True):
        refuses(UsageError, f"The number keep is {keep!r}", Checkpoints, tmp_path, keep=keep)
    refuses(UsageError, "root takes a path, but got 3", Checkpoints, 3)


def test_what_is_written_beside_training_is_what_a_save_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    par, optimizer = trained()
    beside = Checkpoints(tmp_path / "beside", asynchronous=True)
    at_once = Checkpoints(tmp_path / "at_once")
    for _ in range(3):
        one = at_once.save(par, optimizer, extra=[1])
        other = beside.save(par, optimizer, extra=[1])
        memory = {name: value.data_ptr() for name, value in beside._buffers.items()}
        steps(par, optimizer, [batch()])
    beside.wait()
    assert memory == {name: value.data_ptr() for name, value in beside._buffers.items()}, "one copy, used again"
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name

    with monkeypatch.context() as patched:
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        patched.setattr("autopar.runtime.checkpoint.write.commit", full)
        beside.save(par, optimizer)
        refusal = r"Cannot write the checkpoint .* no space left on device\. Make room there.*checkpoint that was"
        refuses(UsageError, refusal, beside.save, par, optimizer)
    assert beside.latest() == other
    beside.save(par, optimizer)
    beside.wait()


def test_a_checkpoint_of_torch_is_named(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    par, _ = trained(2)
    save({"model": par}, checkpoint_id=tmp_path)
    loaded = build()
    said = r"\.metadata, which torch.distributed.checkpoint writes.*load\({\"model\": par}"
    refuses(CheckpointError, said, loaded.load, tmp_path)
    assert loaded.step_count == 0
    load({"model": loaded}, checkpoint_id=tmp_path)  # as the error says
    assert loaded.step_count == 2
    assert same(loaded.full_state_dict(), par.full_state_dict())
    assert loaded.train_step(batch(5)).item() == par.train_step(batch(5)).item()
