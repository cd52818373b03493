"""What ``make gpu`` runs, on a small model on the CPU where there is no GPU."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.benchmark.batches import Launch, local_ranks
from autopar.benchmark.rank_runs import Job
from autopar.hardware.read import load_profile
from tools.benchmarks import device as ratios
from tools.gpu import __main__ as gpu
from tools.gpu.one_device import Comparison, Setting, cluster_of, compare, false_fits

LLAMA = (
    "hf:llama?hidden_size=32&intermediate_size=64&num_hidden_layers=1&num_attention_heads=4&num_key_value_heads=2"
    "&vocab_size=64&max_position_embeddings=64"
)
SMALL = Setting(model=LLAMA, sequence=16, precision="fp32", global_batch_size=2, rounds=1, steps=2)
RECOMPUTES = ("none", "selective", "full")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would run everything")
def test_without_a_gpu_the_command_says_what_it_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    for step in gpu.STEPS.values():
        assert step.title in said
    assert not (tmp_path / "out").exists()


def test_a_step_without_its_packages_says_so_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[Path] = []
    step = gpu.Step(title="a step", run=lambda out: not ran.append(out), needs=("json", "no_such_package"))
    assert not gpu.passed(step, tmp_path)
    assert "no_such_package not installed" in capsys.readouterr().out and not ran
    assert gpu.passed(replace(step, needs=()), tmp_path) and ran == [tmp_path]


@pytest.mark.slow
def test_profile_predictions_and_page_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that a GPU machine does, but for the device: operators, a profile, every plan, both predictions, a page."""
    monkeypatch.setattr("autopar.hardware.machine.machine_profile", lambda: load_profile("cpu"))
    assert gpu.run_profile(tmp_path, [SMALL])
    profile = load_profile(str(tmp_path / gpu.PROFILE))
    assert profile.device.operators is not None and profile.device.operators.times
    assert ", 0 failed" in capsys.readouterr().out
    assert profile.device.rate("float32").provenance.startswith("ceiling measured")
    assert gpu.run_predictions(tmp_path, [SMALL])
    found = json.loads((tmp_path / "predictions.json").read_text(encoding="utf-8"))[SMALL.name]
    assert len(found["shipped"]["plans"]) == 2 * len(RECOMPUTES)  # micro-batches of 1 and 2
    shipped, measured = ({row["key"]: row for row in found[name]["plans"]} for name in ("shipped", "measured"))
    for key, row in shipped.items():
        assert row["measured_s"] == measured[key]["measured_s"]  # measured once
        assert row["predicted_s"] != measured[key]["predicted_s"]
        assert row["measured_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.25)
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| fp32-16 | shipped | 6 | 0 | 0 |" in text and "| fp32-16 | measured | 6 | 0 | 0 |" in text
    assert "All settings: shipped: 6 plans" in text
    for mode in RECOMPUTES[1:]:
        assert text.count(f"recompute={mode}") == 2


@pytest.mark.slow
def test_measurements_of_a_stopped_run_are_kept(tmp_path: Path) -> None:
    clusters = {"shipped": cluster_of(load_profile("cpu"), "cpu")}
    with local_ranks(1, run_timeout_s=300.0) as launch:
        first = compare(SMALL, clusters, launch, device_type="cpu", folder=tmp_path)

    def refused(job: object) -> Sequence[dict[str, dict[str, float]]]:
        raise AssertionError(f"all is measured: {job}")

    again = compare(SMALL, clusters, refused, device_type="cpu", folder=tmp_path)
    assert again.outcomes == first.outcomes


def test_a_plan_that_runs_out_of_memory_is_a_false_fit(tmp_path: Path) -> None:
    def launch(job: Job) -> Sequence[dict[str, dict[str, object]]]:
        found: dict[str, dict[str, object]] = {
            key: {"seconds": [1.0, 1.0], "layers_s": 1.0, "memory_bytes": 10**6, "parts": {}} for key in job.plans
        }
        found[next(iter(job.plans))] = {"failure": "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. | Tried"}
        return [found]

    clusters = {"shipped": cluster_of(load_profile("cpu"), "cpu")}
    fake: Launch = launch
    found = compare(SMALL, clusters, fake, device_type="cpu", folder=tmp_path)
    outcome = found.outcomes["shipped"]
    assert len(false_fits(outcome.rows)) == outcome.score.failures == 1
    text = gpu.page([Comparison(setting=SMALL, outcomes=found.outcomes)], "a device")
    assert "| fp32-16 | shipped | 5 | 1 | 1 |" in text and "CUDA out of memory. / Tried" in text


@pytest.mark.slow
def test_programs_of_the_ratios_compute_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ratios.json"
    small = ["--sequence", "16", "--batch", "2", "--micro-batch", "1", "--steps", "2"]
    assert ratios.main(["--model", LLAMA, "--out", str(out), *small]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found["fp32"]["step_s"]) == {"autopar", "torch"}
    assert set(found["bf16"]["step_s"]) == {"autopar", "FSDP2", "torch.autocast"}
    assert "bf16 FSDP2" in capsys.readouterr().out
    with pytest.raises(AssertionError, match=r"FSDP2: losses of step 1"):
        ratios.check_losses({"autopar": [1.0, 2.0], "FSDP2": [1.0, 2.1]}, 1e-2)


@pytest.mark.gpu
def test_collectives_over_nccl_with_one_rank_are_right(tmp_path: Path) -> None:
    assert gpu.run_nccl(tmp_path)
    assert json.loads((tmp_path / "nccl.json").read_text(encoding="utf-8"))["wrong"] == []
