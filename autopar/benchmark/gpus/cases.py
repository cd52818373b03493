"""The plans that are trained, one for each way to spread a model over so many ranks."""

from __future__ import annotations

from dataclasses import dataclass

BATCH = 16
"""Samples of a step; whatever ranks take samples divide it."""

LLAMA = (
    "hf:llama?hidden_size=128&intermediate_size=256&num_hidden_layers=4&num_attention_heads=8&num_key_value_heads=8&"
    "vocab_size=512&max_position_embeddings=64"
)
GPT2 = "hf:gpt2?n_embd=128&n_layer=4&n_head=8&vocab_size=512&n_positions=64"
MIXTRAL = LLAMA.replace("hf:llama", "hf:mixtral") + "&num_local_experts=8&num_experts_per_tok=2"
LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan: its model, what is pinned, and the precision."""

    name: str
    pins: tuple[str, ...]
    model: str = LLAMA
    precision: str = "fp32"


def cases_of(num_ranks: int) -> tuple[Case, ...]:
    """Those for 2, 4 or 8 ranks: every axis alone, and where there are enough ranks two together."""
    n, half = num_ranks, num_ranks // 2
    ring, gather, ulysses = (("cp=" + str(n), f"cp_attention={way}") for way in ("ring", "gather", "ulysses"))
    found = [
        Case(name="tensor parallel", pins=(f"tp={n}",)),
        Case(name="tensor parallel, GPT-2", pins=(f"tp={n}",), model=GPT2),
        Case(name="data parallel", pins=(f"dp_replicate={n}",)),
        Case(name="ZeRO 1", pins=(f"dp_shard={n}", "zero=1")),
        Case(name="ZeRO 2", pins=(f"dp_shard={n}", "zero=2", "recompute=selective")),
        Case(name="ZeRO 3", pins=(f"dp_shard={n}", "zero=3", "recompute=full")),
        Case(name="ZeRO 3 in bf16", pins=(f"dp_shard={n}", "zero=3"), precision="bf16"),
        Case(name="pipeline", pins=("pp=2", f"dp_shard={half}", "micro_batch=1")),
        Case(name="interleaved pipeline", pins=("pp=2", "virtual_stages=2", f"dp_replicate={half}", "micro_batch=1")),
        Case(name="context parallel, ring", pins=ring),
        Case(name="context parallel, ring in bf16", pins=ring, precision="bf16"),
        Case(name="context parallel, gather in bf16", pins=gather, precision="bf16"),
        Case(name="context parallel, Ulysses in bf16", pins=ulysses, precision="bf16"),
        Case(name="experts on the tensor axis", pins=(f"tp={n}", f"ep={n}", "ep_data=1"), model=MIXTRAL),
        Case(name="experts over data", pins=(f"ep={n}", f"dp_shard={n}"), model=MIXTRAL),
        Case(name="experts over data in bf16", pins=(f"ep={n}", f"dp_shard={n}"), model=MIXTRAL, precision="bf16"),
    ]
    if half > 1:
        found += [
            Case(name="tensor and data parallel", pins=("tp=2", f"dp_shard={half}", "zero=3")),
            Case(name="pipeline and tensor parallel", pins=("pp=2", f"tp={half}", "micro_batch=1")),
        ]
    return tuple(found)
