"""A training script of a few seconds that can be told to die: ``fit_script.py FOLDER PINS``, under a launcher.

``FIT_FAULTS`` are ``signal,step,rank`` each, once in a folder; ``FIT_STEPS`` and ``FIT_DROPOUT`` are numbers; with
``FIT_ASYNCHRONOUS`` checkpoints are written beside training. The losses of each step and a digest of the parameters when training
ends, by itself or told to, go to ``FOLDER/log.RANK``, the process to ``FOLDER/process.RANK``.
"""

import hashlib
import os
import signal
import sys
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


def _fault(folder: Path, step: int, rank: int) -> None:
    """Whoever comes to one leaves a mark."""
    for fault in os.environ.get("FIT_FAULTS", "").split():
        kind, *place = fault.split(",")
        mark = folder / f"faulted.{kind}"
        if place == [str(step), str(rank)] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), getattr(signal, kind))


def main(folder: Path, pins: list[str]) -> None:
    torch.manual_seed(0)
    data, steps = batches(), int(os.environ.get("FIT_STEPS", "12"))
    par = autopar.parallelize(
        Net(float(os.environ.get("FIT_DROPOUT", "0.1"))), cluster="cpu:1x2", example_inputs=data[0],
        global_batch_size=8, pins=pins, on_resize="replan", collective_timeout_s=15.0,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    (folder / f"process.{par.rank}").write_text(str(os.getpid()))
    log = folder / f"log.{par.rank}"

    def on_step(done: StepDone) -> None:
        with log.open("a") as file:
            file.write(f"{done.step} {done.loss!r}\n")
        _fault(folder, done.step, par.rank)

    def on_end(how: str) -> None:
        digest = hashlib.sha256()
        for value in par.full_state_dict().values():
            digest.update(value.numpy().tobytes())
        with log.open("a") as file:
            file.write(f"{how} {digest.hexdigest()}\n")

    try:
        autopar.fit(
            par, optimizer, data, steps=steps, scheduler=scheduler, max_norm=1.0, save_every=SAVE_EVERY, on_step=on_step,
            checkpoints=autopar.Checkpoints(folder / "checkpoints", keep=2, asynchronous="FIT_ASYNCHRONOUS" in os.environ),
        )  # fmt: skip
    except SystemExit:
        on_end("told")
        raise
    on_end("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
