"""Graphs that are kept between commands: the same plan, without a trace, wherever the description says all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.models import graph_for_plan
from autopar.models import graph_for_plan as kept
from autopar.models.graph_for_plan import traced
from autopar.planner.sharding.input_axes import samples_apart
from tests.support.cli_runner import Run

MODEL = "gpt:layers=1,hidden=32,heads=2,vocab=64,seq=16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", os.fspath(tmp_path))
    return tmp_path / "graphs"


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each trace."""
    made, trace = [], graph_for_plan.trace_model

    def counted(*given: object, **named: object) -> object:
        made.append(str(named["name"]))
        return trace(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(graph_for_plan, "trace_model", counted)
    return made


def graph_of(model: str = MODEL, **changes: object) -> str:
    """Its fingerprint."""
    given = {"sequence": 16, "precision": "fp32", "opaque": (), "global_batch_size": 8, **changes}
    folder = Path(os.environ["AUTOPAR_CACHE"])
    return traced(model, samples_apart=samples_apart, cache_dir=folder, **given).fingerprint  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_graph_is_traced_once_for_all_batches_of_a_command(folder: Path, count: list[str], run: Run) -> None:
    search = ("search", MODEL, "--cluster", "cpu:1x2", "--space", "quick", "--json")
    first = run(*search, "--global-batch", 8)
    again = run(*search, "--global-batch", 16, "--pin", "tp=2")
    assert (first.code, again.code, len(count)) == (0, 0, 1)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_whatever_a_graph_depends_on_makes_another(folder: Path, count: list[str]) -> None:
    assert graph_of() == graph_of()
    other = {"model": MODEL.replace("vocab=64", "vocab=128"), "sequence": 8, "precision": "bf16", "opaque": ("*.mlp",)}
    for made, (name, value) in enumerate(other.items(), start=2):
        graph_of(**{name: value})  # type: ignore[arg-type]
        assert len(count) == len(list(folder.iterdir())) == made, name


def test_another_version_makes_another(folder: Path, count: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph_of()
    monkeypatch.setattr(kept, "version", lambda package: "0.0")
    graph_of()
    assert len(count) == 2


@pytest.mark.slow
def test_what_cannot_be_read_is_traced_again(folder: Path, count: list[str]) -> None:
    graph = graph_of()
    (file,) = folder.iterdir()
    for made, broken in enumerate((b"", b"no pickle", b"\x80\x04N."), start=2):
        file.write_bytes(broken)
        assert graph_of() == graph
        assert len(count) == made
        assert file.read_bytes() != broken


def test_what_may_have_changed_is_not_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "gpt2"
    local.mkdir()
    monkeypatch.chdir(tmp_path)
    assert [kept._is_told(text) for text in ("my.models:net", "hf:gpt2", "hf:llama", MODEL)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPAR_CACHE", os.fspath(tmp_path / "file" / "cache"))
    assert graph_of() == graph_of()


@pytest.mark.slow
def test_those_used_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, count: list[str]) -> None:
    monkeypatch.setattr(kept, "MAX_FILES", 2)
    for hidden in (32, 64, 32, 96, 32):  # the first is used again before there are too many
        graph_of(MODEL.replace("hidden=32", f"hidden={hidden}"))
        for place, file in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(file, ns=(place, place))  # file systems tell apart no two moments
    assert len(count) == 3
    assert len(list(folder.iterdir())) == 2
