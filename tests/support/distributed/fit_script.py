"""A training script of a few seconds that can be told to die: ``fit_script.py FOLDER PINS``, under a launcher.

``FIT_FAULT`` is ``kind,step,rank``, once in a folder; ``FIT_STEPS`` and ``FIT_DROPOUT`` are numbers; with ``FIT_ASYNCHRONOUS``
checkpoints are written beside training. The losses of each step and a digest of the parameters go to ``FOLDER/log.RANK``, the
process to ``FOLDER/process.RANK``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.runtime.fit import StepDone

SAVE_EVERY = 4


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32)) for _ in range(2)
        )
        self.out = nn.Linear(32, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        return functional.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 64, (8, 16), generator=generator) for _ in range(5)]
    return [{"x": x, "y": (x + 1) % 64} for x in found]


def _fault(kind: str) -> None:
    if kind == "hang":
        time.sleep(3600.0)
    os.kill(os.getpid(), getattr(signal, kind))


def _armed(folder: Path) -> tuple[str, int, int] | None:
    """The fault, once: whoever comes to its step has left a mark."""
    text = os.environ.get("FIT_FAULT", "")
    if not text or (folder / "faulted").exists():
        return None
    kind, step, rank = text.split(",")
    return kind, int(step), int(rank)


def main(folder: Path, pins: list[str]) -> None:
    torch.manual_seed(0)
    data, steps = batches(), int(os.environ.get("FIT_STEPS", "12"))
    ranks = int(os.environ["WORLD_SIZE"])
    par = autopar.parallelize(
        Net(float(os.environ.get("FIT_DROPOUT", "0.1"))),
        cluster=f"cpu:1x{ranks}" if pins else "cpu:1x2",
        example_inputs=data[0],
        global_batch_size=8,
        pins=pins,
        on_resize="replan",
        collective_timeout_s=15.0,
    )
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    (folder / f"process.{par.rank}").write_text(str(os.getpid()))
    fault, log = _armed(folder), folder / f"log.{par.rank}"

    def on_step(done: StepDone) -> None:
        with log.open("a") as file:
            file.write(f"{done.step} {done.loss!r}\n")
        if fault is not None and (done.step, par.rank) == fault[1:]:
            (folder / "faulted").write_text(fault[0])
            _fault(fault[0])

    autopar.fit(
        par, optimizer, data, steps=steps, scheduler=scheduler, max_norm=1.0, save_every=SAVE_EVERY, on_step=on_step,
        checkpoints=autopar.Checkpoints(folder / "checkpoints", keep=2, asynchronous="FIT_ASYNCHRONOUS" in os.environ),
    )  # fmt: skip
    digest = hashlib.sha256()
    for value in par.full_state_dict().values():
        digest.update(value.numpy().tobytes())
    with log.open("a") as file:
        file.write(f"end {digest.hexdigest()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
