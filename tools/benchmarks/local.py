"""Predicted against measured on CPU ranks of this machine: models by links, one page.

``python -m tools.benchmarks.local --out out/local --page docs/evidence/local.md [--netcluster PATH]``: two and four ranks on
loopback and, where the path of an emulator of networks is given (a script that starts torchrun in network namespaces:
``PATH --nodes N --nproc P --rate R --delay-ms D --timeout S -- SCRIPT ARGUMENTS``), two nodes behind slow links.
Measurements are kept under ``--out``: a run that was stopped goes on, and predictions can be held against old ones.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autopar.benchmark.batches import Launch, Outcome, local_ranks
from autopar.benchmark.local import BenchmarkRequest, on_cluster
from autopar.benchmark.rank_runs import QUIET_PROFILER, Job, LinkTask, measured_cluster
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.hardware.link import load_json
from autopar.hardware.machine import machine_profile
from autopar.hardware.read import MachineProfile
from autopar.models.resolve import resolve_model
from autopar.util.files import write_json, write_text
from autopar.util.formatting import seconds
from tools.revision import revision

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "deep and narrow": "gpt:layers=12,hidden=64,heads=4,vocab=256,seq=64",
    "shallow and wide": "gpt:layers=2,hidden=512,heads=8,vocab=256,seq=64",
    "large vocabulary": "gpt:layers=2,hidden=128,heads=4,vocab=16384,seq=32",
    "mixture of experts": "mixtral:layers=2,hidden=128,heads=4,kv_heads=4,ffn=256,vocab=256,seq=64,experts=4,top_k=2",
}


@dataclass(frozen=True)
class Setting:
    """``rate`` (bits per second) and ``delay_ms`` of the link between ``nodes``; None: one node, loopback.

    Behind a slow link a step takes seconds: fewer plans, fewer steps, and none that is predicted to be ``slowest`` times as
    slow as the picked one. ``beside``: the setting of as many ranks on loopback.
    """

    name: str
    nodes: int
    per_node: int
    rate: str | None = None
    delay_ms: float = 0.0
    beside: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "-").replace("/", "-").replace(",", "")


SLOWEST = 12.0
SETTINGS = (
    Setting("2 ranks, loopback", 1, 2),
    Setting("4 ranks, loopback", 1, 4),
    Setting("2 nodes x 1, 200 Mbit/s, 2 ms", 2, 1, "200mbit", 2.0, "2 ranks, loopback"),
    Setting("2 nodes x 1, 1 Gbit/s, 2 ms", 2, 1, "1gbit", 2.0, "2 ranks, loopback"),
    Setting("2 nodes x 2, 200 Mbit/s, 2 ms", 2, 2, "200mbit", 2.0, "4 ranks, loopback"),
)


def cluster_of(setting: Setting, profile: MachineProfile, launch: Launch, out: Path) -> Cluster:
    """This machine; what its cores give to so many ranks and collectives on its links as the ranks measured them."""
    shape = setting.nodes, setting.per_node
    return measured_cluster(setting.name, profile, shape, launch, kept=_kept(setting, out))


def _kept(setting: Setting, out: Path) -> Path:
    return out / f"ranks {setting.file_name}.json".replace(" ", "-")


def through(netcluster: Path, setting: Setting, timeout_s: float) -> Launch:
    """Ranks in emulated nodes."""

    def launch(job: Job | LinkTask) -> Sequence[Mapping[str, Mapping[str, Any]]]:
        with tempfile.TemporaryDirectory(prefix="autopar-local-") as name:
            job_file, result = Path(name) / "job", Path(name) / "result.json"
            job_file.write_bytes(pickle.dumps(job))
            command = [sys.executable, str(netcluster), f"--nodes={setting.nodes}", f"--nproc={setting.per_node}"]
            command += [f"--rate={setting.rate}", f"--delay-ms={setting.delay_ms}", f"--timeout={timeout_s}", "--"]
            command += [str(ROOT / "tools/benchmarks/rank_job.py"), str(job_file), str(result)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            try:
                done = subprocess.run(
                    command, check=False, timeout=timeout_s + 60, env=environment, capture_output=True, text=True
                )
            except subprocess.TimeoutExpired as error:
                raise AutoparError(f"Emulated ranks took longer than {timeout_s:g} s", fix="Raise the limit") from error
            if not result.is_file():
                raise AutoparError("Emulated ranks failed", got=done.stderr[-2000:], fix="See what they say")
            ranks: list[dict[str, dict[str, Any]]] = json.loads(result.read_text(encoding="utf-8"))
            return ranks

    return launch


def measure(options: argparse.Namespace) -> list[tuple[str, Setting, Outcome | None, float | None]]:
    """Every model under every setting: its outcome, None where none was found, and the load of the machine then.

    Of what an earlier run has measured it is the load that was noted then, None where none was.
    """
    found = []
    loads = load_json(options.out / "loads.json") if (options.out / "loads.json").is_file() else {}
    for setting in SETTINGS:
        if setting.rate is not None and options.netcluster is None:
            print(f"{setting.name}: left out, no --netcluster", flush=True)
            continue
        if options.settings and not any(part in setting.name for part in options.settings):
            continue
        with ExitStack() as stack:
            if setting.rate is None:
                launch = stack.enter_context(local_ranks(setting.num_ranks, run_timeout_s=options.timeout))
            else:
                launch = through(options.netcluster, setting, options.timeout)
            cluster = cluster_of(setting, machine_profile(cache_dir=options.cache), launch, options.out)
            for name, model in MODELS.items():
                if options.models and not any(part in name for part in options.models):
                    continue
                request = BenchmarkRequest(
                    model=model,
                    num_ranks=setting.num_ranks,
                    sample=options.sample if setting.rate is None else options.slow_sample,
                    rounds=options.rounds if setting.rate is None else 1,
                    warm_up=2 if setting.rate is None else 1,
                    slowest=None if setting.rate is None else SLOWEST,
                    run_timeout_s=options.timeout,
                )
                file = options.out / f"{name} {setting.file_name}.json".replace(" ", "-")
                start, is_new = time.monotonic(), not file.is_file()
                try:
                    outcome: Outcome | None = on_cluster(request, resolve_model(model), cluster, launch, results=file)
                except AutoparError as error:
                    print(f"{name}, {setting.name}: {error}", flush=True)
                    outcome = None
                if is_new:
                    loads[file.stem] = os.getloadavg()[1]
                    write_json(options.out / "loads.json", loads)
                found.append((name, setting, outcome, loads.get(file.stem)))
                score = outcome.score if outcome is not None else None
                print(f"{name}, {setting.name}: {score} ({time.monotonic() - start:.0f} s)", flush=True)
    return found


def page(found: Sequence[tuple[str, Setting, Outcome | None, float | None]], options: argparse.Namespace) -> str:
    """What was found, as Markdown."""
    lines = [
        "# Predicted and measured on the CPU ranks of one machine",
        "",
        f"Written by `python -m tools.benchmarks.local --out out/local --page docs/evidence/local.md --netcluster PATH`; do not edit. Run at revision {revision()}.",
        "",
        (
            f"{os.cpu_count()} cores ({platform.machine()}), a rank a process of one thread, {time.strftime('%Y-%m-%d')}. Of each "
            f"model's space {options.sample or 'all'} candidates were drawn ({options.slow_sample} behind slow links), and the "
            f"plan that the search picks. Plans take turns: {options.rounds} rounds of three timed steps each (one round behind "
            f"slow links, without plans that are predicted to be {SLOWEST:g} times as slow as the picked one), one more before each "
            "round untimed; a plan's time is the median over all timed steps of the slowest rank. Regret is the measured time of "
            "the plan picked over the best measured one, less 1: the best of many noisy medians is too good, so that regret is rather "
            "too large. `spread` is half the distance of a plan's quartiles over its median, the median plan's: differences below "
            "it mean nothing. Before each setting its ranks measured their collectives, what a core gives when all compute, and "
            "how fast the machine then was; nothing was fitted to plans. `speed` is the machine's while the row's plans ran, "
            "over that: 0.9 if the same layers took a ninth longer; what is left of `bias` aside. `load` is the load average over "
            "five minutes when the row was done: above the number of ranks other work ran beside. Ranks that share cores are planned "
            "with their share of them, as if all computed at all times. Those of a pipeline that wait leave theirs to the others, so that "
            "with more ranks than cores pipelines are faster than predicted."
        ),
        "",
        "| model | ranks and links | plans | rank correlation | regret | time off by | bias | speed | memory off by | spread | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, setting, outcome, load in found:
        cells = [
            name,
            setting.name,
            *_cells(outcome, _layers_s(setting, options.out)),
            "-" if load is None else f"{load:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What is picked, and what was best", ""]
    lines += [
        "The time that follows a plan is the measured one.",
        "",
        "| model | ranks and links | picked | best measured |",
        "|---|---|---|---|",
    ]
    for name, setting, outcome, _ in found:
        if outcome is not None:
            named = {
                row.key: f"{row.name} ({seconds(row.measured_s) if row.measured_s else 'failed'})"
                for row in outcome.rows
            }
            picked, best = named[outcome.score.picked], named.get(outcome.score.best, "-")
            lines.append(f"| {name} | {setting.name} | {picked} | {best} |")
    lines += _changes(found)
    failures = [(n, s.name, row) for n, s, o, _ in found if o is not None for row in o.rows if row.failure]
    if failures:
        lines += ["", "## What failed", ""]
        lines += [f"- {n}, {s}: {row.name}: {' '.join(row.failure.split())[-200:]}" for n, s, row in failures]
    return "\n".join(lines) + "\n"


def _changes(found: Sequence[tuple[str, Setting, Outcome | None, float | None]]) -> list[str]:
    """Whether picked and best plan are others behind a slow link than on loopback."""
    known = {(name, setting.name): outcome for name, setting, outcome, _ in found if outcome is not None}
    lines = []
    for name, setting, slow, _ in found:
        near = known.get((name, setting.beside or ""))
        if slow is None or near is None:
            continue
        picked, best = (_moves(near, slow, which) for which in ("picked", "best"))
        stayed_s = next((row.measured_s for row in slow.rows if row.name == picked[0] and row.measured_s), None)
        picked_s = next((row.measured_s for row in slow.rows if row.key == slow.score.picked and row.measured_s), None)
        cost = f"{stayed_s / picked_s:.2f}" if stayed_s and picked_s else "not run"
        cells = [name, setting.name, _told(*picked), _told(*best), cost]
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "",
        "## What a slow link changes",
        "",
        (
            "Against as many ranks on loopback. The last column is the time behind the slow link of the plan that is picked for "
            "loopback, over that of the one that is picked for the slow link."
        ),
        "",
        "| model | ranks and links | picked | best measured | if the pick had stayed |",
        "|---|---|---|---|---|",
        *lines,
    ]


def _moves(near: Outcome, slow: Outcome, which: str) -> tuple[str, str]:
    """Names of the plan on loopback and behind the slow link."""
    names = [
        {row.key: row.name for row in outcome.rows}.get(getattr(outcome.score, which), "-") for outcome in (near, slow)
    ]
    return names[0], names[1]


def _told(near: str, slow: str) -> str:
    return f"as on loopback: {slow}" if near == slow else f"{near} -> {slow}"


def _layers_s(setting: Setting, out: Path) -> float:
    """The speed before the setting; see ``measured_cluster``."""
    return float(load_json(_kept(setting, out)).get("layers_s", 0.0)) if _kept(setting, out).is_file() else 0.0


def _cells(outcome: Outcome | None, layers_s: float) -> list[str]:
    if outcome is None:
        return ["none"] + ["-"] * 7
    score = outcome.score

    def percent(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{100 * value:{sign}.0f} %"

    paces = [row.layers_s for row in outcome.rows if row.layers_s]
    return [
        f"{score.plans} of {outcome.num_candidates}" + (f", {score.failures} failed" if score.failures else ""),
        "-" if score.rho is None else f"{score.rho:.2f}",
        "-" if score.regret is None else f"{100 * score.regret:.0f} %",
        percent(score.mape),
        percent(score.bias, "+"),
        f"{layers_s / median(paces):.2f}" if paces and layers_s else "-",
        percent(score.memory_mape),
        percent(score.spread),
    ]


def main() -> int:
    """Measures what is not yet measured, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/local"))
    parser.add_argument("--page", type=Path)
    parser.add_argument("--netcluster", type=Path)
    parser.add_argument("--cache", type=Path, help="of this machine's measured profile")
    parser.add_argument("--sample", type=int, default=12)
    parser.add_argument("--slow-sample", type=int, default=7, help="plans behind slow links")
    parser.add_argument("--rounds", type=int, default=3, help="of turns on loopback; one behind slow links")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of a batch of plans")
    parser.add_argument("--settings", nargs="*", help="parts of the names of settings; all if not given")
    parser.add_argument("--models", nargs="*", help="likewise of models")
    options = parser.parse_args()
    os.environ.update(QUIET_PROFILER)
    options.out.mkdir(parents=True, exist_ok=True)
    found = measure(options)
    text = page(found, options)
    if options.page is not None:
        write_text(options.page, text, make_folder=True)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
