"""What ``make gpu`` runs: ``python -m autopar.profile.gpu --out FOLDER``.

Everything that only a GPU can answer, in one command: the tests marked ``gpu``, collectives over NCCL with one rank,
and a profile of the device. Where there is no GPU it says what it would do. It needs torch alone: a GPU machine without
a network runs it from the checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.profile import measure

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TEST_TIMEOUT_S = 480
NEEDED = ("spmd_types", "optuna", "networkx", "numpy", "scipy", "jsonschema", "tomli_w", "transformers", "hypothesis")
"""What the tests import besides torch."""


def run_tests(out: Path) -> bool:
    """Run the tests marked ``gpu`` (all must pass); the log goes to ``FOLDER/tests.log``."""
    missing = [name for name in ("pytest", *NEEDED) if importlib.util.find_spec(name) is None]
    if missing:
        print(f"  not run: {', '.join(missing)} not installed; put their wheels into the folder wheels/")
        return False
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
    (out / "nccl.json").write_text(json.dumps({"time_s_of_4_mib": times, "wrong": wrong}, indent=1), encoding="utf-8")
    version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    print(f"  NCCL {version}: {len(times) - len(wrong)} of {len(times)} collectives right on one rank")
    return not wrong


def run_profile(out: Path) -> bool:
    """Measure matmul ceilings and curves, copy bandwidth, launch time; ``FOLDER/device.toml`` (or ``.json``)."""
    profile = device_profile(torch.device("cuda"))
    name = "device.toml" if importlib.util.find_spec("tomli_w") else "device.json"
    if name == "device.toml":
        import tomli_w

        text = tomli_w.dumps(profile)
    else:
        text = json.dumps(profile, indent=1)
    (out / name).write_text(text, encoding="utf-8")
    for dtype, rate in profile["matmul"].items():
        curve = ", ".join(f"{point['smallest_dim']}: {point['efficiency']:.2f}" for point in rate["curve"])
        print(f"  {dtype:9} {rate['ceiling_flops_per_s'] / 1e12:7.1f} TFLOP/s; of it by smallest dim {curve}")
    print(
        f"  copy {profile['bandwidth']['bytes_per_s'] / 1e12:.2f} TB/s, launch {profile['launch']['time_s'] * 1e6:.1f} us"
    )
    print(f"  written to {out / name}")
    return True


def device_profile(device: torch.device) -> dict[str, Any]:
    """The measured tables of a profile's ``[device]``; see ``profiles/README.md``."""
    where = f"measured {time.strftime('%Y-%m-%d')} on {torch.cuda.get_device_name()}, torch {torch.__version__}"
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved()
    matmul = {}
    for dtype in DTYPES:
        times = measure.matmul_times(device, dtype)
        ceiling = max(time.flops_per_s for time in times)
        matmul[str(dtype).removeprefix("torch.")] = {
            "ceiling_flops_per_s": ceiling,
            "calibrated": True,
            "curve": [{"smallest_dim": t.m, "efficiency": t.flops_per_s / ceiling} for t in times],
            "provenance": f"{where}: [m, k] @ [k, n] with n = k = {times[0].k}, random data, median of 5",
        }
    return {
        "name": torch.cuda.get_device_name(),
        "kind": "cuda",
        "memory": {"num_bytes": total, "provenance": where},
        "bandwidth": {
            "bytes_per_s": measure.copy_bandwidth_bytes_per_s(device),
            "provenance": f"{where}: copy of 1 GiB, read plus write",
        },
        "launch": {"time_s": measure.launch_s(device), "provenance": f"{where}: one of a chain of small operators"},
        "host": {
            **measure.host_link(device),
            "provenance": f"{where}: copies of 256 MiB, page-locked, one device alone",
        },
        "reserve": [{"name": "CUDA context", "num_bytes": used, "provenance": f"{where}: used outside the allocator"}],
        "matmul": matmul,
    }


STEPS: dict[str, Callable[[Path], bool]] = {
    "the tests marked gpu": run_tests,
    "collectives over NCCL with one rank": run_nccl,
    "a profile of the device": run_profile,
}


def main() -> int:
    """Run every step, or say what they are; the number of steps that failed."""
    parser = argparse.ArgumentParser(prog="python -m autopar.profile.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for results (default: out/gpu)")
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        print("No CUDA device here. Where there is one, 'make gpu' runs:")
        for title, step in STEPS.items():
            print(f"- {title}: {(step.__doc__ or '').splitlines()[0].replace('FOLDER', str(out)).replace('', '')}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for title, step in STEPS.items():
        print(f"{title}:", flush=True)
        failed += not step(out)
    print(f"{len(STEPS) - failed} of {len(STEPS)} steps passed on {torch.cuda.get_device_name()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
