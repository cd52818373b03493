"""The whole line in a few minutes: measure this machine, search a plan for 4 ranks, train by it, compare.

Start: ``python examples/demo.py``. Prints the plan, the losses of the parallel run beside those of one
process on the same batches, and the predicted step time beside the measured one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import train_gpt2

import autopar

RANKS, STEPS, WARM_UP = 4, 60, 5


def search_plan() -> autopar.Plan:
    """Return a plan for this machine, measured."""
    cluster = autopar.Cluster.detect(num_ranks=RANKS)
    batch = train_gpt2.make_batch(0)
    return autopar.search(
        train_gpt2.build_model(), example_inputs=batch, cluster=cluster, global_batch_size=train_gpt2.BATCH
    )


def train_parallel(plan: Path, record: Path) -> dict[str, list[float]]:
    """Losses and step times of the training script under torchrun."""
    script = Path(train_gpt2.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script)]
    command += [f"--plan={plan}", f"--steps={STEPS}", f"--record={record}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=240, env=environment)
    return json.loads(record.read_text())


def train_alone() -> list[float]:
    """Train the same steps by the model itself in this process, without autopar."""
    model = train_gpt2.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train_gpt2.LEARNING_RATE, fused=True)
    losses = []
    for step in range(STEPS):
        loss = model(**train_gpt2.make_batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Run the demo; return 0 when both runs agree and the loss falls."""
    print(f"1. Measuring this machine, searching a plan for {RANKS} ranks")
    plan = search_plan()
    print(plan)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        print(f"\n2. Training by torchrun on {RANKS} ranks", flush=True)
        record = train_parallel(Path(folder) / "plan.json", Path(folder) / "record.json")
    print("\n3. The same steps in one process")
    alone = train_alone()
    print(f"\n{'step':>6} {'parallel':>10} {'one process':>12} {'difference':>11}")
    for step in [*range(0, STEPS, 10), STEPS - 1]:
        mine, theirs = record["losses"][step], alone[step]
        print(f"{step:6} {mine:10.5f} {theirs:12.5f} {abs(mine - theirs) / theirs:11.1e}")
    worst = max(abs(a - b) / b for a, b in zip(record["losses"], alone, strict=True))
    measured = median(record["times"][WARM_UP:])
    low, high = plan.predicted.step_time_interval_s
    print(f"\nlargest relative difference of {STEPS} losses: {worst:.1e}")
    predicted = f"{plan.predicted.step_time_s * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})"
    print(f"step time: predicted {predicted}, measured {measured * 1e3:.1f} ms (median of {STEPS - WARM_UP} steps)")
    falls = sum(alone[-5:]) < 0.9 * sum(alone[:5])
    return 0 if worst < 1e-3 and falls else 1


if __name__ == "__main__":
    sys.exit(main())
