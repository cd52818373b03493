import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import app as cli_app
from autopar.cli import plans
from autopar.plan.file import save_plan
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from tests.support.cli_runner import Run
from tests.support.example_plans import llama_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(llama_plan(), path)
    return path


def test_an_interrupt_without_a_result_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plans, "parse_cluster", interrupted)
    done = run("search", "gpt:layers=2,hidden=32,heads=2,vocab=64", "--cluster", "cpu:1x2", "--global-batch", 8)
    assert (done.code, done.out, done.err.splitlines()[-1]) == (130, "", "interrupted before there was a result")


def test_a_shell_whose_folder_was_removed_is_told_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (gone := tmp_path / "gone").mkdir()
    os.chdir(gone)
    gone.rmdir()
    said = "The folder of this shell is not there: no such file or directory. Change to another."
    assert run("devices").mistake == said


def test_show_has_the_keys_of_the_contract(run: Run, plan_file: Path) -> None:
    done = run("show", plan_file)
    assert (done.code, done.out, done.err) == (0, f"{llama_plan()}\n", "")
    found = run("show", plan_file, "--json").json
    assert found["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 4, "ep": 1}
    assert found["num_micro_batches"] == 16 and [stage["pp_rank"] for stage in found["stages"]] == [0, 1]
    keys = {
        "micro_batch_size", "schedule", "virtual_stages", "zero_stage", "recompute", "stages", "predicted", "search",
    }  # fmt: skip
    assert keys <= set(found)
    predicted = {"step_time_s", "step_time_interval_s", "peak_memory_bytes", "mfu", "tokens_per_s", "breakdown"}
    assert predicted <= set(found["predicted"])
    assert {"wall_time_s", "candidates", "evaluated", "lower_bound_s", "gap"} <= set(found["search"])
    assert sum(found["predicted"]["breakdown"].values()) == pytest.approx(found["predicted"]["step_time_s"])


def test_show_writes_pictures(run: Run, plan_file: Path, tmp_path: Path) -> None:
    done = run("show", plan_file, "--html", tmp_path / "p.html", "--perfetto", tmp_path / "p.trace")
    assert (done.code, done.out) == (0, "")
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert len(json.loads((tmp_path / "p.trace").read_text())["traceEvents"]) > 60
    said = run("show", plan_file, "--html", tmp_path / "no" / "p.html").mistake
    assert said.startswith(f"Cannot write {tmp_path}/no/p.html: no such file or directory")


def test_compare_shows_predictions_and_choices(run: Run, plan_file: Path, tmp_path: Path) -> None:
    slower = replace(
        llama_plan(), mesh=Mesh(pp=2, dp_shard=2, tp=4), zero_stage=3,
        predicted=replace(llama_plan().predicted, step_time_s=0.9),
    )  # fmt: skip
    save_plan(slower, tmp_path / "other.json")
    text = run("compare", plan_file, tmp_path / "other.json").text
    assert "+100.0 %" in text and "zero_stage: 1 -> 3" in text
    found = run("compare", plan_file, tmp_path / "other.json", "--json").json
    assert found["step_time_ratio"] == 2.0
    assert {"path": "zero_stage", "before": 1, "after": 3} in found["changes"]
    assert "The plans make the same choices." in run("compare", plan_file, plan_file).out


def test_explain_prints_the_reasons_and_needs_a_model_for_an_alternative(run: Run, tmp_path: Path) -> None:
    plan = replace(llama_plan(), model=replace(llama_plan().model, name="MyModel"))
    save_plan(plan, tmp_path / "plan.json")
    done = run("explain", tmp_path / "plan.json")
    assert (done.code, done.out) == (0, plan.search.reasons[0] + "\n")
    assert run("explain", tmp_path / "plan.json", "--json").json["pins"] == ["tp<=4"]
    said = run("explain", tmp_path / "plan.json", "--why-not", "tp=8,pp=2").mistake
    assert "Say which model with --model" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["find"], "No such command"),
        (["show"], "Missing argument"),
        (["search", "gpt:layers=1"], "--cluster"),
        (["search", "gpt:layers=1", "--cluster", "cpu:1x1", "--global-batch", "many"], "--global-batch"),
        (["search", "gpt:layers=1", "--cluster", "cpu:1x1", "--global-batch", "0"], "--global-batch"),
        (["show", "plan.json", "--yaml"], "--yaml"),
    ],
)
def test_wrong_usage_exits_with_2(run: Run, arguments: list[str], expected: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert expected in done.err
    assert "Traceback" not in done.err and done.out == ""


def test_a_defect_is_one_line_without_debug(run: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_plan: object) -> str:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("autopar.plan.text.render_plan", fail)
    done = run("show", plan_file)
    assert done.code == 1
    assert done.error.startswith("A defect of autopar: ZeroDivisionError: by nothing. Please report it")
    assert "Traceback" in run("show", plan_file, "--debug").err


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")


@pytest.mark.parametrize(
    ("behind", "code", "out", "err"),
    [
        pytest.param("> /dev/full", 1, "", "error: No space left on device", marks=FULL), ("--json >&-", 0, "", "$"),
        ("| head -n 1", 0, "Plan for", "(?s)(?!.*Traceback)"),
    ],
)  # fmt: skip
def test_only_a_full_disk_is_an_error_of_the_output(
    plan_file: Path, checkout: Path, behind: str, code: int, out: str, err: str
) -> None:
    script = f"{sys.executable} -c 'from autopar.cli import main; main()' show {plan_file} {behind}"
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": checkout}
    done = subprocess.run(["bash", "-c", script], check=False, **options)
    assert done.returncode == code and done.stdout.startswith(out)
    assert re.match(err, done.stderr), done.stderr


@pytest.mark.parametrize("verb", ["search", "largest-batch", "pareto"])
def test_a_result_is_kept_where_its_file_or_its_text_cannot_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    model = ("gpt:layers=1,hidden=32,heads=4,vocab=64,seq=16", "--cluster", "cpu:1x1", "--global-batch", "2")
    with monkeypatch.context() as patched:
        patched.setattr("autopar.cli.plans.print_result", lambda *_: 1 / 0)
        assert run(verb, *model, "--space", "quick", "-o", "kept.json").code == 1
    assert run("show", "kept.json").code == 0
    monkeypatch.setattr(Plan, "save", lambda *_: 1 / 0)
    done = run(verb, *model, "--space", "quick", "-o", "lost.json")
    assert done.code == 1 and "micro" in done.out


def test_doctor_names_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("doctor", "--json").json
    assert found["ok"] is True
    assert {"torch", "gpu", "gloo (CPU runs)", "NCCL (GPU runs)", "spmd-types"} <= {c["name"] for c in found["checks"]}
    monkeypatch.setattr("autopar.cli.machines._PACKAGES", ("time-travel",))
    monkeypatch.setattr("autopar.cli.machines._OLDEST_TORCH", "2.100")
    done = run("doctor")
    assert done.code == 1
    assert re.search(r"missing  time-travel +not installed; pip install time-travel", done.out)
    assert re.search(r"missing  torch .*; install torch 2\.100 or later", done.out)


def test_commands_are_those_of_the_contract_and_of_the_help(run: Run) -> None:
    names = [command.name for command in cli_app.app.registered_commands]
    assert names == [
        *("search", "estimate", "smallest-cluster", "cheapest-cluster", "longest-sequence", "largest-batch", "sweep"),
        *("pareto", "published", "show", "explain", "compare", "run", "verify", "trace", "validate"),
        *("devices", "pins", "doctor"),
    ]
    groups = [group.name for group in cli_app.app.registered_groups]
    assert groups == ["profile", "benchmark"]
    assert run("--version").out.startswith("autopar 0.")
    said = run("--help").out
    assert all(f"  {name} " in said for name in (*names, *groups))
