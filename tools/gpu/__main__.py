"""What ``make gpu`` runs: ``python -m tools.gpu --out FOLDER [--only STEP ...]``.

Everything that only a GPU can answer, in one command: the tests marked ``gpu``, collectives over NCCL with one rank, a
profile of the device with times of operators, predictions against measured steps and memory, one rank of larger plans,
and the time of a step over that of the model by torch alone. Where there is no GPU it says what it would do. A GPU machine
without a network runs it from the checkout; steps can be run one at a time, and go on where they were stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from autopar.benchmark.batches import Row
from autopar.errors import first_line
from autopar.measure import timers as measure
from autopar.util.files import write_json, write_text
from autopar.util.formatting import num_bytes, percent, seconds
from tools.gpu.machine_facts import facts_text, machine_facts
from tools.gpu.one_device import SETTINGS, Comparison, Setting, cluster_of, compare, false_fits, to_dict, write_profile

TEST_TIMEOUT_S = 480
NEEDED = ("spmd_types", "optuna", "networkx", "numpy", "scipy", "tomli_w", "transformers", "hypothesis")
"""What planning and the tests import besides torch."""

RANKS, SAMPLE = 8, 6
"""Plans for so many ranks, of which one is run alone, and how many of them."""

PROFILE, ERRORS = "device.toml", "errors.log"


def run_tests(out: Path) -> bool:
    """Run the tests marked ``gpu`` (all must pass); the log goes to ``FOLDER/tests.log``."""
    # other files may need packages that are missing on a machine without a network
    files = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *files]
    command += ["--import-mode=importlib", "-W", "default"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False)
    (out / "tests.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    print("  " + "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))
    return done.returncode in (0, 5)  # 5: no test is marked


def run_nccl(out: Path) -> bool:
    """Collectives over NCCL with one rank: each must give back what was put in; times go to ``FOLDER/nccl.json``."""
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "rendezvous").as_uri()
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        try:
            source = torch.randn(2**20, device=device)
            target = torch.empty_like(source)
            collectives: dict[str, Callable[[], object]] = {
                "all_reduce": lambda: dist.all_reduce(target.copy_(source)),
                "all_gather": lambda: dist.all_gather_into_tensor(target, source),
                "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source),
                "all_to_all": lambda: dist.all_to_all_single(target, source),
                "broadcast": lambda: dist.broadcast(target.copy_(source), src=0),
            }
            times, wrong = {}, []
            for name, collective in collectives.items():
                target.zero_()
                collective()
                torch.cuda.synchronize()
                if not torch.equal(target, source):
                    wrong.append(name)
                times[name] = measure.median_time_s(collective, device)
        finally:
            dist.destroy_process_group()
    write_json(out / "nccl.json", {"time_s_of_4_mib": times, "wrong": wrong})
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    print(f"  NCCL {version}: {len(times) - len(wrong)} of {len(times)} collectives right on one rank")
    return not wrong


def run_profile(out: Path, settings: Sequence[Setting] = ()) -> bool:
    """Measure ceilings, bandwidth, launch, the host's link and every operator; ``FOLDER/device.toml`` and its operators."""
    from autopar.hardware.machine import machine_profile

    file = write_profile(machine_profile(), measure_device(), settings or SETTINGS, out / PROFILE)
    torch.cuda.empty_cache()
    print(f"  {len(file.times)} operators timed, {len(file.failed)} failed; written to {out / PROFILE}")
    for call, reason in file.failed.items():
        print(f"  not measured: {call[:100]}: {reason}")
    return bool(file.times)


def run_predictions(out: Path, settings: Sequence[Setting] = ()) -> bool:
    """Every micro-batch and recompute at each length and precision, measured beside both profiles' predictions; ``FOLDER/gpu.md``."""
    from autopar.benchmark.batches import local_ranks, score_line
    from autopar.hardware.machine import identity, machine_profile
    from autopar.hardware.read import load_profile

    clusters = {"shipped": cluster_of(machine_profile(), "shipped")}
    if (out / PROFILE).is_file():
        clusters["measured"] = cluster_of(load_profile(str(out / PROFILE)), "measured")
    else:
        print(f"  no {out / PROFILE}: by the shipped profile alone")
    device_type, found = measure_device().type, []
    for setting in settings or SETTINGS:
        with local_ranks(1, run_timeout_s=setting.request.run_timeout_s) as launch:
            found.append(compare(setting, clusters, launch, device_type=device_type, folder=out / "parts"))
        write_text(
            out / "gpu.md", page(found, identity()), make_folder=True
        )  # what is there counts where the next setting is stopped
        write_json(out / "predictions.json", to_dict(found))
        for name, outcome in found[-1].outcomes.items():
            print(f"  {setting.name}, {name}: {score_line(outcome)}", flush=True)
    outcomes = [outcome for one in found for outcome in one.outcomes.values()]
    return not any(false_fits(outcome.rows) or outcome.score.failures for outcome in outcomes)


def run_rank(out: Path, settings: Sequence[Setting] = ()) -> bool:
    """One rank of plans for eight, whose collectives move nothing: its compute and memory; ``FOLDER/rank.json``."""
    from autopar.benchmark.batches import render
    from autopar.benchmark.local import BenchmarkRequest, run_local

    first = (settings or SETTINGS)[0]
    request = BenchmarkRequest(
        model=first.model, num_ranks=RANKS, as_rank=0, global_batch_size=RANKS * first.global_batch_size, sample=SAMPLE,
        sequence=first.sequence, precision=first.precision, rounds=first.rounds, steps=first.steps, warm_up=1,
    )  # fmt: skip
    outcome = run_local(request, results=out / "parts" / "rank.json")
    write_json(out / "rank.json", outcome.to_dict())
    print("  " + render(outcome).replace("\n", "\n  "))
    return not outcome.score.failures


def run_ratios(out: Path, settings: Sequence[Setting] = ()) -> bool:
    """A step of the program over one of the model by torch alone, in turn, losses equal first; ``FOLDER/ratios.json``."""

    first = (settings or SETTINGS)[0]
    command = [sys.executable, "-m", "tools.benchmarks.device", "--out", str(out / "ratios.json")]
    command += ["--model", first.model, "--sequence", str(first.sequence), "--batch", str(first.global_batch_size)]
    return subprocess.run(command, check=False).returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``needs``: packages besides torch."""

    title: str
    run: Callable[[Path], bool]
    needs: tuple[str, ...] = NEEDED

    @property
    def missing(self) -> list[str]:
        """Packages that are not there."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


STEPS = {
    "tests": Step(title="the tests marked gpu", run=run_tests, needs=("pytest", *NEEDED)),
    "nccl": Step(title="collectives over NCCL with one rank", run=run_nccl, needs=()),
    "profile": Step(title="a profile of the device", run=run_profile),
    "predictions": Step(title="predicted against measured", run=run_predictions),
    "rank": Step(title="one rank of larger plans", run=run_rank),
    "ratios": Step(title="steps over those of torch alone", run=run_ratios),
}


def measure_device() -> torch.device:
    """What is measured: the GPU, or a CPU with one thread where there is none (for tests)."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    torch.set_num_threads(1)  # the clock is the thread's own
    return torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every step, or say what they are; the number of steps that failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for results (default: out/gpu)")
    parser.add_argument("--only", choices=STEPS, nargs="+", help="these steps (default: all)")
    options = parser.parse_args(arguments)
    out: Path = options.out
    chosen = [STEPS[name] for name in options.only or STEPS]
    if not torch.cuda.is_available():
        titles = ", ".join(step.title for step in chosen)
        print(f"No CUDA device here; where there is one 'make gpu' runs {titles}, and writes pages to send in to {out}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    outcomes = {step.title: passed(step, out) for step in chosen}
    failed = sum(not outcome for outcome in outcomes.values())
    facts = machine_facts()
    write_json(out / "machine.json", facts)
    lines = ["# What ran on this machine", "", facts_text(facts), ""]
    lines += [f"- {title}: {'passed' if outcome else 'failed'}" for title, outcome in outcomes.items()]
    write_text(out / "summary.md", "\n".join(lines) + "\n", make_folder=True)
    print(f"{len(chosen) - failed} of {len(chosen)} steps passed on {torch.cuda.get_device_name()}; send in {out}")
    return failed


def passed(step: Step, out: Path) -> bool:
    """Runs a step; one that fails does not keep the others from running."""
    print(f"{step.title}:", flush=True)
    if step.missing:
        print(f"  not run: {', '.join(step.missing)} not installed; put their wheels into the folder wheels/")
        return False
    try:
        return step.run(out)
    except Exception as error:  # noqa: BLE001  of whatever kind, drivers' among them: the other steps are to be run
        print(f"  failed: {type(error).__name__}: {first_line(error)}; all of it is in {out / ERRORS}")
        with (out / ERRORS).open("a", encoding="utf-8") as file:
            file.write(f"{step.title}:\n{''.join(traceback.format_exception(error))}\n")
        return False


# --- the page

PAGE = """# Predicted against measured on one device

Written by `make gpu`; do not edit. {device}. One optimizer step of every micro-batch and recompute (medians of the timed steps)
and the allocator's peak, beside predictions by the shipped profile, which was fitted to other runs, and by one of the
measured ceilings, bandwidth and operators of this device. Off: predicted over measured.

| setting | profile | plans | failed | false fits | step time off by | bias | inside the interval | memory off by | rank correlation | regret |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(found: Sequence[Comparison], device: str) -> str:
    """Markdown: the scores, then every plan.

    Args:
        device: its name and the software, for people.
    """
    lines = [PAGE.format(device=device).rstrip("\n")]
    for one in found:
        for name, outcome in one.outcomes.items():
            score = outcome.score
            cells = [
                one.setting.name, name, str(score.plans), str(score.failures), str(len(false_fits(outcome.rows))),
                percent(score.mape), percent(score.bias, sign=True), percent(score.coverage),
                percent(score.memory_mape), _number(score.rho), percent(score.regret),
            ]  # fmt: skip
            lines.append(_row(cells))
    lines += ["", _summary(found)]
    for one in found:
        lines += ["", f"## {one.setting.model}, {one.setting.sequence} tokens, {one.setting.precision}", ""]
        lines += _plans(one)
    return "\n".join(lines) + "\n"


def _summary(found: Sequence[Comparison]) -> str:
    """Over all settings, by profile."""
    parts = []
    for name in found[0].outcomes if found else ():
        rows = [row for one in found for row in one.outcomes[name].rows if row.measured_s is not None]
        sized = [row for row in rows if row.measured_bytes]
        if rows:
            time_off = fmean(abs(row.predicted_s / (row.measured_s or 1.0) - 1) for row in rows)
            text = f"{name}: {len(rows)} plans, step time off by {percent(time_off)}"
            if sized:
                text += f", memory by {percent(fmean(abs(_bytes_off(row)) for row in sized))}"
            parts.append(text)
    return "All settings: " + "; ".join(parts) + "."


def _plans(one: Comparison) -> list[str]:
    names = list(one.outcomes)
    head = ["plan", "measured", "spread", *(f"{name}, off" for name in names), "memory", *(f"{n}, off" for n in names)]
    lines = [_row(head), "|" + "---|" * len(head)]
    by_key = [{row.key: row for row in outcome.rows} for outcome in one.outcomes.values()]
    for row in next(iter(one.outcomes.values())).rows:
        others = [rows[row.key] for rows in by_key]
        if row.measured_s is None:
            last = next((line.strip() for line in reversed(row.failure.splitlines()) if line.strip()), "")
            lines.append(_row([row.name, f"failed: {last}".replace("|", "/"), *[""] * (len(head) - 2)]))
            continue
        size = row.measured_bytes or 0
        lines.append(
            _row(
                [
                    row.name,
                    seconds(row.measured_s),
                    percent(row.spread),
                    *(percent(other.predicted_s / row.measured_s - 1, sign=True) for other in others),
                    num_bytes(size) if size else "-",
                    *(percent(_bytes_off(other), sign=True) if size else "-" for other in others),
                ]
            )
        )
    return lines


def _bytes_off(row: Row) -> float:
    return row.predicted_bytes / row.measured_bytes - 1 if row.measured_bytes else 0.0


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
