"""The plans that are run among fakes, and where a host may wait for its device."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from autopar.plan.plan import PrecisionName

GPT2 = "hf:gpt2?n_embd=64&n_layer=2&n_head=4&vocab_size=256&n_positions=64"
QUIET = GPT2 + "&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
LLAMA = (
    "hf:llama?hidden_size=64&intermediate_size=128&num_hidden_layers={layers}&num_attention_heads=4&num_key_value_heads=2&"
    "vocab_size=256&max_position_embeddings=64"
)
ODD = LLAMA.replace("vocab_size=256", "vocab_size=251")
MIXTRAL = LLAMA.replace("hf:llama", "hf:mixtral") + "&num_local_experts=4&num_experts_per_tok=2"
T5 = "hf:t5?d_model=64&d_kv=16&d_ff=128&num_layers=2&num_heads=4&vocab_size=256"
BERT = (
    "hf:bert?hidden_size=64&num_hidden_layers=2&num_attention_heads=4&intermediate_size=128&vocab_size=256&"
    "max_position_embeddings=64"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan, and the ranks of it that are run one after the other.

    Attributes:
        model: of the catalogue, or ``remembering`` (buffers that steps change) or ``unusual`` (regions that run as written).
        options: of AdamW.
        scales: with a scaler.
    """

    model: str
    ranks: int
    pins: tuple[str, ...] = ()
    precision: PrecisionName = "bf16"
    layers: int = 2
    run: tuple[int, ...] = (0,)
    options: dict[str, Any] = field(default_factory=dict)
    scales: bool = False
    evaluates: bool = True
    is_called: bool = False


def _plans() -> dict[str, dict[str, Case]]:
    cp = {
        way: Case(model=LLAMA, ranks=2, pins=("cp=2", f"cp_attention={way}", "micro_batch=2"))
        for way in ("gather", "ulysses", "ring")
    }
    dense = {
        "one rank": Case(model=LLAMA, ranks=1, pins=("micro_batch=2",), is_called=True),
        "one rank fp32": Case(model=LLAMA, ranks=1, pins=("micro_batch=2",), precision="fp32", is_called=True),
        "tp": Case(model=LLAMA, ranks=2, pins=("tp=2", "micro_batch=2"), is_called=True),
        "tp fp32": Case(model=QUIET, ranks=2, pins=("tp=2", "micro_batch=2"), precision="fp32"),
        "tp padded": Case(model=ODD, ranks=2, pins=("tp=2", "micro_batch=2")),
        "tp x dp ZeRO 3": Case(model=LLAMA, ranks=4, pins=("tp=2", "dp_shard=2", "zero=3", "micro_batch=1"), run=(3,)),
        "dp replicated": Case(model=LLAMA, ranks=2, pins=("dp_replicate=2",), precision="fp32", is_called=True),
        "ZeRO 1": Case(model=LLAMA, ranks=2, pins=("dp_shard=2", "zero=1", "micro_batch=1")),
        "ZeRO 2": Case(model=LLAMA, ranks=2, pins=("dp_shard=2", "zero=2", "micro_batch=1"), is_called=True),
        "HSDP": Case(model=LLAMA, ranks=4, pins=("dp_replicate=2", "dp_shard=2", "zero=3")),
        "recompute full": Case(model=LLAMA, ranks=2, pins=("dp_shard=2", "recompute=full", "micro_batch=1")),
        "recompute selective": Case(model=QUIET, ranks=2, pins=("dp_shard=2", "zero=2", "recompute=selective")),
        "fused optimizer": Case(model=LLAMA, ranks=2, pins=("dp_shard=2",), options={"fused": True}),
        "bert tp": Case(model=BERT, ranks=2, pins=("tp=2", "micro_batch=2")),
        "t5 dp": Case(model=T5, ranks=2, pins=("dp_shard=2",)),
    } | {f"cp {way}": case for way, case in cp.items()}
    pipelines = {
        "1F1B": Case(model=LLAMA, ranks=2, pins=("pp=2", "micro_batch=1"), run=(0, 1)),
        "GPipe": Case(model=LLAMA, ranks=2, pins=("pp=2", "micro_batch=1", "schedule=GPipe"), run=(1,)),
        "interleaved": Case(
            model=LLAMA, layers=4, ranks=2, pins=("pp=2", "virtual_stages=2", "micro_batch=1"), run=(0, 1)
        ),
        "pp x tp fp32": Case(model=LLAMA, ranks=4, pins=("pp=2", "tp=2", "micro_batch=1"), precision="fp32", run=(3,)),
        "pp x dp ZeRO 1": Case(model=LLAMA, ranks=4, pins=("pp=2", "dp_shard=2", "micro_batch=1", "zero=1"), run=(0,)),
        "pp with dropout": Case(model=GPT2, ranks=2, pins=("pp=2", "micro_batch=1"), run=(1,)),
        "pp x cp": Case(model=LLAMA, ranks=4, pins=("pp=2", "cp=2", "cp_attention=ring", "micro_batch=1"), run=(3,)),
        "interleaved x tp with dropout": Case(
            model=GPT2.replace("n_layer=2", "n_layer=4"),
            layers=4,
            ranks=4,
            pins=("pp=2", "virtual_stages=2", "tp=2", "micro_batch=1"),
            run=(3,),
        ),
        "pp recomputed": Case(model=LLAMA, ranks=2, pins=("pp=2", "micro_batch=1", "recompute=full"), run=(0,)),
    }
    experts = {
        "experts on one rank": Case(model=MIXTRAL, ranks=1, pins=("micro_batch=2",)),
        "experts fp32": Case(model=MIXTRAL, ranks=1, pins=("micro_batch=2",), precision="fp32"),
        "experts on tp": Case(model=MIXTRAL, ranks=2, pins=("tp=2", "ep=2", "ep_data=1", "micro_batch=2")),
        "experts over data": Case(model=MIXTRAL, ranks=2, pins=("ep=2", "dp_shard=2")),
        "experts over data and tp": Case(
            model=MIXTRAL, ranks=4, pins=("ep=4", "ep_data=2", "dp_shard=2", "tp=2"), run=(3,)
        ),
        "experts over data and tp, ZeRO 3 recomputed": Case(
            model=MIXTRAL,
            ranks=8,
            pins=("ep=4", "ep_data=2", "dp_shard=4", "tp=2", "zero=3", "recompute=full"),
            run=(5,),
        ),
        "experts in a pipeline": Case(model=MIXTRAL, ranks=2, pins=("pp=2", "micro_batch=1"), run=(1,)),
    }
    others = {
        "dropout": Case(model=GPT2, ranks=1, pins=("micro_batch=2",), is_called=True),
        "dropout tp": Case(model=GPT2, ranks=2, pins=("tp=2", "micro_batch=2")),
        "dropout recomputed": Case(model=GPT2, ranks=2, pins=("dp_shard=2", "recompute=full")),
        "dropout ZeRO 3": Case(
            model=GPT2, ranks=2, pins=("dp_shard=2", "zero=3", "recompute=full", "micro_batch=1"), run=(1,)
        ),
        "dropout cp x tp": Case(
            model=GPT2, ranks=4, pins=("cp=2", "cp_attention=ulysses", "tp=2", "micro_batch=2"), run=(3,)
        ),
        "dropout cp gather": Case(model=GPT2, ranks=2, pins=("cp=2", "cp_attention=gather", "micro_batch=2"), run=(1,)),
        "dropout selective": Case(model=GPT2, ranks=2, pins=("dp_shard=2", "recompute=selective")),
        "fp16 unscaled": Case(model=QUIET, ranks=2, pins=("dp_shard=2",), precision="fp16"),
        "fp16 scaled": Case(model=QUIET, ranks=2, pins=("dp_shard=2",), precision="fp16", scales=True),
        "offloaded activations": Case(
            model=LLAMA, ranks=2, pins=("dp_shard=2", "offload=activations", "recompute=none")
        ),
        "offloaded optimizer": Case(model=LLAMA, ranks=2, pins=("dp_shard=2", "offload=optimizer")),
        "offloaded with dropout": Case(
            model=GPT2, ranks=1, pins=("offload=activations", "recompute=none", "micro_batch=2")
        ),
        "buffers": Case(model="remembering", ranks=2, pins=("dp_shard=2",), precision="fp32", evaluates=False),
        "regions": Case(model="unusual", ranks=2, pins=("dp_replicate=2",), precision="fp32", evaluates=False),
    }
    return {"dense": dense, "pipelines": pipelines, "experts": experts, "others": others}


PLANS = _plans()


def runs(names: Container[str]) -> Iterator[tuple[str, str, Case, int]]:
    """What is run of these cases: group, name with rank, case and rank; ``1F1B rank 0`` stands for one rank of a case."""
    for group, cases in PLANS.items():
        for name, case in cases.items():
            for rank in case.run:
                full = f"{name} rank {rank}"
                if name in names or full in names:
                    yield group, full, case, rank


IN_THE_SUITE = frozenset((
    *("tp", "recompute selective", "1F1B rank 0", "interleaved x tp with dropout", "pp x cp"),
    *("experts on one rank", "experts over data and tp, ZeRO 3 recomputed"),
    *("dropout ZeRO 3", "dropout cp x tp", "fp16 scaled", "offloaded activations", "offloaded optimizer"),
    *("buffers", "regions"),
))  # fmt: skip
"""Each mechanism once, where it meets most others; ``python -m tools.benchmarks.launches`` runs all plans by the same checks."""

SAVES, LOADS = "save", "load"
"""Phases in which the host waits for everything: a checkpoint is written and read there."""

LISTED: dict[tuple[str, str, str], str] = {
    (
        "host waits",
        "Tensor.tolist",
        "autopar/ops/experts.py:_read",
    ): "sizes of what is sent to the ranks of experts, or of each "
    "expert's rows where no grouped product is: once a call, and priced",
    (
        "host waits",
        "Tensor.tolist",
        "autopar/runtime/local_optimizer.py:_checksums",
    ): "a step on the host begins when its gradients are down, and ends when its parameters are up",
    (
        "host waits",
        "event.synchronize",
        "autopar/runtime/monitor.py:_between",
    ): "the first steps of a run are measured, and no later",
    (
        "copy that blocks",
        "cuda to cpu",
        "autopar/runtime/step/local_batch.py:_checksums_of_ranks",
    ): "samples on the device are compared before one step in 256, when it has done the step before",
    (
        "host waits",
        "Tensor.item",
        "autopar/runtime/step/global_loss.py:step",
    ): "torch's scaler asks whether a step is made",
    (
        "host waits",
        "Tensor.__bool__",
        "autopar/runtime/same_values.py:check_now",
    ): "whether copies of parameters differ: before one step in a thousand, and before a checkpoint",
}
"""Where a program may wait or keep states: kind, what, and file and function, with the reason."""


def wrong(found: dict[str, Any]) -> list[str]:
    """What is wrong with what was seen of a plan on one rank; nothing where it runs on its device alone."""
    if found["error"]:
        return [found["error"]]
    said = [
        f"{phase}: {kind}: {what} in {where}"
        for phase, kind, what, where, _ in found["seen"]
        if kind == "devices mixed"
    ]
    quiet = {SAVES, LOADS, "build", "warm", "end"}
    said += [
        f"{phase}: {kind}: {what} in {where} is not listed"
        for phase, kind, what, where, _ in found["seen"]
        if (kind, what, where) not in LISTED and phase not in quiet
    ]
    launches = found["launches"]
    said += ["a step launches nothing"] * (launches["step"] <= 100)
    return said + [
        f"a step launches {launches['step']} kernels, but {launches[phase]} in the phase {phase!r}"
        for phase in ("loaded", "batch on the device")
        if launches[phase] < launches["step"]
    ]
