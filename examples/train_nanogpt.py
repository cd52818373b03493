"""A nanoGPT-like training script of one's own. The lines that end in ``# autopar`` are all that makes it parallel.

Start: ``torchrun --nproc-per-node 2 examples/train_nanogpt.py``; again, with more ``--steps``, and it goes on from its checkpoint.
What a line was for one device stands behind ``was:``; lines without it are new.
"""

import argparse
import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar  # autopar
from autopar.integrations.loss import step_loss  # autopar

BATCH, LENGTH, VOCABULARY, ACCUMULATED, WARM_UP, RATE = 8, 32, 128, 2, 4, 3e-3
TOKENS = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down, self.drop = (
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Returns logits and the loss; the head has the weights of the embedding."""

    def __init__(self, layers: int, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(LENGTH, hidden)
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(LENGTH, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_batch(number: int) -> dict[str, Tensor]:
    """Return the global batch of this number, the same on every rank."""
    starts = torch.randint(len(TOKENS) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(number))
    windows = torch.stack([TOKENS[start : start + LENGTH + 1] for start in starts])
    return {"ids": windows[:, :-1], "targets": windows[:, 1:]}


def rate(step: int, steps: int) -> float:
    """Warm up, then a cosine."""
    return RATE * min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """For one device."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """For one device; gives the step to go on with."""
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def arguments() -> argparse.Namespace:
    """Of the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stop", type=int, help="leave off after this step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--folder", type=Path, default=Path("out/nanogpt"), help="for checkpoint and record")
    return parser.parse_args()


def main() -> None:
    """One rank of the job."""
    options = arguments()
    checkpoint, start, record = options.folder / "checkpoint", 0, []
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = GPT(options.layers, options.hidden, 4, options.dropout)
    model = autopar.parallelize(model, example_inputs=make_batch(0), loss_fn=lambda out, _: out[1])  # autopar
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    if checkpoint.exists():
        model.load(checkpoint, optimizer)  # autopar, was: start = load(checkpoint, model, optimizer)
        start = model.step_count // ACCUMULATED  # autopar
    for step in range(start, options.stop or options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options.steps)
        mean = 0.0
        for number in range(step * ACCUMULATED, (step + 1) * ACCUMULATED):
            batch = make_batch(number)
            loss = step_loss(model, batch)  # autopar, was: _, loss = model(**batch)
            (loss / ACCUMULATED).backward()
            mean += loss.item() / ACCUMULATED
        norm = model.clip_grad_norm_(1.0)  # autopar, was: norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.append((mean, norm.item()))
    model.eval()
    batch = make_batch(-1)
    validation = model.evaluate(batch)  # autopar, was: _, validation = model(**batch)
    model.save(checkpoint, optimizer)  # autopar, was: save(checkpoint, model, optimizer, step + 1)
    if model.is_main_process:  # autopar, was: if True:
        print(f"step {step + 1}  loss {mean:.4f}  validation {validation.item():.4f}")
        found = {"steps": record, "validation": validation.item()}
        (options.folder / "record.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
