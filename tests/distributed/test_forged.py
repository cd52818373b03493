"""Older checkpoints, whose index is a pickle: files that name functions are refused by name, and nothing of them is run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.checkpoint.load import whole
from autopar.runtime.checkpoint.older import OlderFolder, read_metadata
from autopar.runtime.job import start, stop
from autopar.verification.rank_pool import WorkerPool
from tests.distributed.test_unusual import planned
from tests.support.damage import Touch
from tests.support.distributed import jobs
from tests.support.distributed.layouts import on_ranks
from tests.support.distributed.oddities import REMEMBERING

pytestmark = pytest.mark.distributed


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
        "optimizer.b.group": (("lr", 0.5), ("betas", (0.9, 0.99)), ("n", 3), ("yes", True)),
        "progress.step": torch.tensor(3),
        "progress.seed": torch.tensor(0),
    }
    save(dict(state), checkpoint_id=tmp_path / "run")
    yield tmp_path / "run", state
    stop()


def test_what_was_saved_is_read(saved: tuple[Path, dict[str, Any]]) -> None:
    source = OlderFolder(saved[0])
    source.check_files()
    assert torch.equal(whole(source, "a", saved[0]), saved[1]["a"])
    assert source.values["optimizer"]["settings"] == [
        {"lr": 0.5, "betas": {"$tuple": [0.9, 0.99]}, "n": 3, "yes": True}
    ]
    assert source.values["progress"] == {"step": 3, "seed": 0}


@pytest.mark.parametrize("said", FORGED)
def test_forged_metadata_is_refused_by_name(saved: tuple[Path, dict[str, Any]], said: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (saved[0] / ".metadata").write_bytes(FORGED[said](made))
    with pytest.raises(CheckpointError, match=said.replace(".", r"\.")):
        OlderFolder(saved[0])
    assert not made.exists()


def test_the_forgeries_would_run(tmp_path: Path) -> None:
    for said in list(FORGED)[:3]:
        made = tmp_path / said.replace("|", "_")
        pickle.loads(FORGED[said](made))
        assert made.exists(), said


def test_a_forged_value_is_refused_by_name(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    made, metadata = tmp_path / "made", read_metadata(saved[0])
    stored = next(s for index, s in metadata.storage_data.items() if index.fqn == "optimizer.b.group")
    file = saved[0] / stored.relative_path
    value = io.BytesIO()
    torch.save(Touch(made), value)
    before = file.read_bytes()
    file.write_bytes(before + value.getvalue())
    stored.offset, stored.length = len(before), len(value.getvalue())
    (saved[0] / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names what is no number or text.*nothing of it was run"):
        OlderFolder(saved[0])
    assert not made.exists()


def test_all_ranks_refuse_a_forged_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    subject, (plan, graph) = REMEMBERING, planned(REMEMBERING, "tp=2 dp_replicate=2")
    batches = [subject.make_batch(8, seed=seed) for seed in range(2)]
    run, made = tmp_path / "run", tmp_path / "made"
    on_ranks(pool, jobs.save_run, subject, plan, graph, batches, str(run))
    (run / "checkpoint.json").unlink()
    for forged, said in ((".metadata", "an older autopar: its index is a pickle"), ("checkpoint.json", "checksum")):
        (run / forged).write_bytes(pickle.dumps(Touch(made)))
        with pytest.raises(AutoparError, match=rf"CheckpointError.*{said}"):
            on_ranks(pool, jobs.load_run, subject, plan, graph, batches, str(run), "")
        assert not made.exists(), forged
