"""What ``make gpus`` runs: ``python -m tools.gpus --out FOLDER [--ranks N] [--device cpu] [--only STEP ...]``.

Every part is a torchrun job of its own, so that whatever ends one leaves the others; a page and all numbers as JSON are written
after each, for a person to send in. With ``--device cpu`` the same runs over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.util.files import write_json, write_text
from autopar.util.formatting import seconds
from autopar.verification.results import LOSS_TOLERANCE, TENSOR_TOLERANCE
from tools.gpu.machine_facts import facts_text, machine_facts
from tools.gpus.ranks import cases_of

TIMEOUT_S = 300.0
"""Of a job of one part."""

HALF_TOLERANCE = 2e-2
"""Of losses in bf16 against those in fp32: numbers of 8 bits, a few roundings of each on the way to a loss."""

SIZES = (8, 4, 2)
LINKS_BUDGET_S = 60.0

Found = dict[str, Any]


def trainings(found: Found, out: Path, options: argparse.Namespace) -> bool:
    """Plans of every axis against one device: losses, parameters, steps beside predictions, waits of the host."""
    rows: dict[str, Any] = found.setdefault("trainings", {})
    for number, case in enumerate(cases_of(options.ranks)):
        result = out / "trainings" / f"{number}.json"
        result.unlink(missing_ok=True)
        text = _job(options, out / "trainings" / f"{number}.log", "train", result, str(number))[1]
        row: dict[str, Any] = {"failure": text[-3000:]}
        if result.is_file():
            row = json.loads(result.read_text(encoding="utf-8"))
        if "failure" not in row:
            row["is_right"] = _is_right(row["loss_error"], row["parameter_error"], case.precision)
        rows[case.name] = row
        said = "failed" if "failure" in row else "right" if row["is_right"] else f"off by {row['parameter_error']:.1e}"
        print(f"  {case.name}: {said}", flush=True)
        _write(found, out)
    return all(row.get("is_right", False) for row in rows.values())


def _is_right(loss_error: float, parameter_error: float, precision: str) -> bool:
    """Parameters after steps of AdamW in bf16 are held against nothing: it divides gradients by their own size."""
    if precision != "fp32":
        return loss_error <= HALF_TOLERANCE
    return loss_error <= LOSS_TOLERANCE and parameter_error <= TENSOR_TOLERANCE


def links(found: Found, out: Path, options: argparse.Namespace) -> bool:
    """Collectives between the ranks, as `autopar profile links` times them."""
    output = out / "links.toml"
    arguments = ["-m", "autopar", "profile", "links", "-o", str(output), "--budget", str(LINKS_BUDGET_S)]
    code, text = _torchrun(options, out / "links.log", arguments)
    fitted = [line for line in text.splitlines() if line.strip()][-12:]
    found["links"] = (
        f"`links.toml`{'' if output.is_file() else ' (not written)'}:\n\n```\n" + "\n".join(fitted) + "\n```"
    )
    print(f"  {'written to ' + str(output) if code == 0 else 'failed: see links.log'}")
    return code == 0 and output.is_file()


def failure(found: Found, out: Path, options: argparse.Namespace) -> bool:
    """One rank fails and stays alive while the others wait for the number of a loss: they must say so, and end."""
    result = out / "failure.json"
    result.unlink(missing_ok=True)
    code, text = _job(options, out / "failure.log", "fail", result)
    if not result.is_file():
        found["failure"] = {"said": f"The job came to no failure: {text[-500:]}"}
        return False
    took_s = time.time() - json.loads(result.read_text(encoding="utf-8"))["began"]
    line = next((one.strip() for one in text.splitlines() if "RankFailedError" in one and "on purpose" in one), "")
    is_told = bool(line) and code != 0
    said = f"The others ended {took_s:.0f} s after it with: {line}" if is_told else "The others were not told."
    found["failure"] = {"said": said, "took_s": took_s, "is_told": is_told}
    print(f"  {said}")
    return is_told


STEPS: dict[str, Callable[[Found, Path, argparse.Namespace], bool]] = {
    "trainings": trainings,
    "links": links,
    "failure": failure,
}


def _job(options: argparse.Namespace, log: Path, what: str, result: Path, *rest: str) -> tuple[int, str]:
    arguments = ["-m", "tools.gpus.ranks", what, str(result), options.device, *rest]
    return _torchrun(options, log, arguments)


def _torchrun(options: argparse.Namespace, log: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Exit status and what all ranks said, which goes to the log as well; a job that takes too long is ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # whatever the machine has: there may be fewer GPUs than ranks
    try:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        parts = (error.stdout, error.stderr)
        said = "".join(part.decode(errors="replace") if isinstance(part, bytes) else part or "" for part in parts)
        code, text = 124, f"{said}\nended after {TIMEOUT_S:g} s"
    log.write_text(text, encoding="utf-8")
    return code, text


def _write(found: Found, out: Path) -> None:
    write_json(out / "gpus.json", found)
    write_text(out / "gpus.md", page(found), make_folder=True)


def run(options: argparse.Namespace) -> int:
    """All chosen parts; how many failed."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    found: Found = {"machine": machine_facts(), "ranks": options.ranks, "device": options.device}
    chosen = options.only or list(STEPS)
    failed = []
    for name in chosen:
        print(f"{name}: {(STEPS[name].__doc__ or '').splitlines()[0]}", flush=True)
        try:
            is_right = STEPS[name](found, out, options)
        except Exception as error:  # noqa: BLE001  of whatever kind: the other parts are to be run
            found.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"
            print(f"  failed: {error}")
            is_right = False
        failed += [] if is_right else [name]
        _write(found, out)
    print(
        f"{len(chosen) - len(failed)} of {len(chosen)} parts passed; send in {out / 'gpus.md'} and {out / 'gpus.json'}"
    )
    return len(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, or say in a line what would be."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpus", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpus"), help="folder for results (default: out/gpus)")
    parser.add_argument("--ranks", type=int, choices=SIZES, help="how many (default: as many as there are GPUs)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, to try it out")
    parser.add_argument("--only", choices=STEPS, nargs="+", help="these parts (default: all)")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        count = torch.cuda.device_count()
        options.ranks = min(options.ranks or max(SIZES), next((size for size in SIZES if size <= count), 0))
        if options.ranks < min(SIZES):
            print(
                f"{count} CUDA devices here; on 2 to 8 of them 'make gpus' trains plans of every axis over NCCL against one device, "
                "times collectives, holds steps against their predictions, lets a rank fail, and writes a page to send in; "
                "'--device cpu' does so over gloo"
            )
            return 0
    options.ranks = options.ranks or 2
    return run(options)


# --- the page

PAGE = """# Plans on {ranks} ranks of one machine

Written by `make gpus`; do not edit. {facts}

Each plan trains a small model for three steps of AdamW, and so does one device: the largest relative difference of a loss, and of
a parameter over the parameter's largest element. Step: the median of a few more steps of the slowest rank. Waits: how often the
host of a rank waits for its device in a step. Models are small so that any GPU runs them: hosts are what their steps take.

| plan | mesh | loss off by | parameter off by | right | step | predicted | waits |
|---|---|--:|--:|---|--:|--:|---|
"""


def page(found: Mapping[str, Any]) -> str:
    """Markdown of what :func:`run` found."""
    lines = [PAGE.format(ranks=found["ranks"], facts=facts_text(found["machine"])).rstrip("\n")]
    for name, row in found.get("trainings", {}).items():
        if "failure" in row:
            lines.append(f"| {name} | | | | failed | | | |")
            continue
        syncs = [count for count in row["syncs"] if count is not None]
        cells = [
            name, row["mesh"], f"{row['loss_error']:.1e}", f"{row['parameter_error']:.1e}", "yes" if row["is_right"] else "no",
            seconds(row["step_s"]), seconds(row["predicted_s"]), str(max(syncs)) if syncs else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    for name, row in found.get("trainings", {}).items():
        if "failure" in row:
            lines += ["", f"{name}:", "", "```", row["failure"].replace("```", "'''"), "```"]
    if "links" in found:
        lines += ["", "## Links", "", found["links"]]
    if "failure" in found:
        lines += ["", "## A failure on purpose", "", found["failure"]["said"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
