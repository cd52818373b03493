"""Trains a small GPT-2 on the bytes of Python's help: ``torchrun --nproc-per-node 4 examples/train_gpt2.py --cluster cpu:1x4``."""

import argparse
import json
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

BATCH, SEQUENCE, LEARNING_RATE = 16, 64, 1e-3
TEXT = "\n".join(topics[name] for name in sorted(topics))
TOKENS = torch.tensor(list(TEXT.encode()))


def make_batch(step: int) -> dict[str, torch.Tensor]:
    """Return the global batch of a step, the same on every rank: each takes its part of it."""
    starts = torch.randint(len(TOKENS) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([TOKENS[start : start + SEQUENCE] for start in starts])
    return {"input_ids": ids, "labels": ids}


def build_model() -> GPT2LMHeadModel:
    """Make the model with the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": 256}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=None, eos_token_id=None))


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", help="as in `autopar search`; this machine, measured, when left out")
    parser.add_argument("--plan", help="a plan file instead of a search")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--record", help="JSON file for losses and step times")
    options = parser.parse_args()
    par = autopar.parallelize(build_model(), cluster=options.cluster, plan=options.plan, example_inputs=make_batch(0))
    optimizer = torch.optim.AdamW(par.parameters(), lr=LEARNING_RATE, fused=True)
    record = {"losses": [], "times": []}
    for step in range(options.steps):
        start = time.perf_counter()
        loss = par.train_step(make_batch(step))
        par.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        record["losses"].append(loss.item())
        record["times"].append(time.perf_counter() - start)
        if par.is_main_process and step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    if par.is_main_process and options.record:
        Path(options.record).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
