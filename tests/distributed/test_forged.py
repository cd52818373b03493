"""Checkpoints whose files name functions are refused by name, and nothing of them is run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.errors import AutoparError
from autopar.runtime.job import start, stop
from autopar.runtime.weights.checkpoint_reader import Planner, Reader
from autopar.runtime.weights.checkpoint_writer import Writer
from autopar.verification.rank_pool import WorkerPool
from tests.distributed.test_state import planned, traced
from tests.support.distributed import jobs

pytestmark = pytest.mark.distributed


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _by_way_of(path: Path) -> bytes:
    """Protocol 4: a name with a dot is looked up attribute by attribute."""
    command = f"touch {path}".encode()
    module, name = b"torch.distributed.checkpoint.metadata", b"os.system"
    text = b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name))
    return b"\x80\x04" + text + b"\x93\x8c" + bytes([len(command)]) + command + b"\x85R."


FORGED = {
    "posix.mkdir|nt.mkdir": lambda path: pickle.dumps(Touch(path)),
    "torch.distributed.checkpoint.metadata.os.system": _by_way_of,
    "posix.system|os.system": lambda path: f"cos\nsystem\n(S'touch {path}'\ntR.".encode(),
    "torch.load|torch.serialization.load": lambda path: f"ctorch\nload\n(S'{path}'\ntR.".encode(),
    "none of a checkpoint": lambda path: pickle.dumps({"state_dict_metadata": {}}),
    "outside of the folder": lambda path: _elsewhere(),
    "cannot be read": lambda path: b"\x80\x04ctorch\nSize\nK\x01\x85R.",
}


def _elsewhere() -> bytes:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    stored = {MetadataIndex("a"): _StorageInfo("../secret", 0, 1)}
    return pickle.dumps(Metadata(state_dict_metadata={}, storage_data=stored))


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    start("cpu")
    state = {
        "a": torch.arange(6.0).bfloat16(),
        "b.group": (("lr", 0.5), ("betas", (0.9, 0.99)), ("n", 3), ("yes", True)),
    }
    save(dict(state), storage_writer=Writer(tmp_path / "run"))
    yield tmp_path / "run", state
    stop()


def _read(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    found = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for name, v in state.items()}
    load(found, storage_reader=Reader(path), planner=Planner())
    return found


def test_what_was_saved_is_read(saved: tuple[Path, dict[str, Any]]) -> None:
    found = _read(*saved)
    assert torch.equal(found["a"], saved[1]["a"])
    assert found["b.group"] == saved[1]["b.group"]


@pytest.mark.parametrize("said", FORGED)
def test_forged_metadata_is_refused_by_name(saved: tuple[Path, dict[str, Any]], said: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (saved[0] / ".metadata").write_bytes(FORGED[said](made))
    with pytest.raises(pickle.UnpicklingError, match=said.replace(".", r"\.")):
        Reader(saved[0]).read_metadata()
    with pytest.raises(CheckpointException):
        _read(*saved)
    assert not made.exists()


def test_the_forgeries_would_run(tmp_path: Path) -> None:
    for said in list(FORGED)[:3]:
        made = tmp_path / said.replace("|", "_")
        pickle.loads(FORGED[said](made))
        assert made.exists(), said


def test_a_forged_value_is_refused_by_name(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    made, metadata = tmp_path / "made", Reader(saved[0]).read_metadata()
    stored = next(s for index, s in metadata.storage_data.items() if index.fqn == "b.group")
    file = saved[0] / stored.relative_path
    value = io.BytesIO()
    torch.save(Touch(made), value)
    file.write_bytes(value.getvalue())
    stored.offset, stored.length = 0, len(value.getvalue())
    (saved[0] / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match=r"b\.group names .*mkdir.*nothing of it was run"):
        _read(saved[0], {"b.group": None})
    assert not made.exists()


def test_all_ranks_refuse_a_forged_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    subject, graph = traced(statistics=False)
    batches = [subject.make_batch(8, seed=seed) for seed in range(2)]
    run, made = tmp_path / "run", tmp_path / "made"
    pool.run(jobs.save_run, subject, planned(graph, "tp2 x dp2"), graph, batches, str(run), timeout_s=60.0)
    (run / ".metadata").write_bytes(pickle.dumps(Touch(made)))
    with pytest.raises(AutoparError, match=r"PlanError.*mkdir, which no checkpoint is made of"):
        pool.run(jobs.load_run, subject, planned(graph, "tp2 x dp2"), graph, batches, str(run), timeout_s=60.0)
    assert not made.exists()
