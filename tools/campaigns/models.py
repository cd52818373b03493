"""Which model families work: each is searched, verified against one device on 4 local ranks, and put in a table.

Run: ``python -m tools.campaigns.models`` writes ``docs/evidence/models.md``; ``--family NAME`` and ``--layout NAME``, both
repeatable, run a part of it. ``--results FILE`` keeps what was found, adds to it, and writes the page once every family
is in it. Plans are made as ``autopar verify MODEL --cluster cpu:1x4`` makes them: in float32, as if links were free.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path

from autopar import api
from autopar.errors import AutoparError
from autopar.graph.graph import Graph, Op
from autopar.graph.operator_kinds import is_attention, is_scores
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.models.resolve import USER_FAILURES, resolve_model
from autopar.plan.plan import Plan
from autopar.planner.space.space import ATTENTION_KINDS
from autopar.rules import table as rules
from autopar.verification.against_one_device import PRELOAD, verify
from autopar.verification.compared_models import DEFAULT_SAMPLES, VerifiedModel
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.results import LOSS_TOLERANCE, TENSOR_TOLERANCE, RankErrors, VerifyReport

RANKS = 4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "models.md"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "search": (),
    "tp2 x dp2": ("tp=2", "pp=1"),
    "pp2 x tp2": ("pp=2", "tp=2"),
    "pp2 x dp2": ("pp=2", "tp=1"),
}

EXPERT_LAYOUTS: dict[str, tuple[str, ...]] = {f"ep{n}": (f"ep={n}", "pp=1") for n in (2, 4)}
"""For models with mixtures of experts."""
SEQUENCE_LAYOUTS: dict[str, tuple[str, ...]] = {
    f"cp{n} {kind}": (f"cp={n}", f"cp_attention={kind}", "pp=1") for kind in ATTENTION_KINDS for n in (2, 4)
}
"""For models with attention."""

_TEXT = "num_hidden_layers=2&hidden_size=32&num_attention_heads=4&intermediate_size=64&vocab_size=96"
_GPT = "n_layer=2&n_embd=32&n_head=4&vocab_size=97&n_positions=32"
_TOWER = "num_hidden_layers=2&hidden_size=32&num_attention_heads=4&intermediate_size=64"
_SIZES = '"num_hidden_layers":2,"hidden_size":32,"num_attention_heads":4,"intermediate_size":64'
_CLIP_TEXT = f'{{{_SIZES},"vocab_size":96,"max_position_embeddings":16,"eos_token_id":2}}'
_CLIP_IMAGE = f'{{{_SIZES},"image_size":12,"patch_size":4}}'
_SPEECH = (
    "&".join(
        f"{side}_{key}={value}"
        for side in ("encoder", "decoder")
        for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    )
    + "&d_model=32&max_source_positions=16"
)
_LATENT = (
    "n_routed_experts=8&num_experts_per_tok=2&n_group=2&topk_group=1&moe_intermediate_size=32&n_shared_experts=1"
    "&first_k_dense_replace=1&q_lora_rank=16&kv_lora_rank=16&qk_nope_head_dim=8&qk_rope_head_dim=8&v_head_dim=8"
)
FAMILIES: dict[str, tuple[str, int | None]] = {
    "GPT-2": (f"hf:gpt2?{_GPT}", 16),
    "GPT-NeoX": (f"hf:gpt_neox?{_TEXT}", 16),
    "Llama": (f"hf:llama?{_TEXT}&num_key_value_heads=2", 16),
    "Mistral": (f"hf:mistral?{_TEXT}&num_key_value_heads=2&sliding_window=8", 16),
    "Qwen3": (f"hf:qwen3?{_TEXT}&num_key_value_heads=2&head_dim=8", 16),
    "Gemma": (f"hf:gemma?{_TEXT}&num_key_value_heads=1&head_dim=8", 16),
    "MPT": ("hf:mpt?n_layers=2&d_model=32&n_heads=4&vocab_size=96&max_seq_len=32", 16),
    "BLOOM": ("hf:bloom?n_layer=2&hidden_size=32&n_head=4&vocab_size=96", 16),
    "Mixtral": (f"hf:mixtral?{_TEXT}&num_key_value_heads=2&num_local_experts=4&num_experts_per_tok=2", 16),
    "Qwen3-MoE": (
        f"hf:qwen3_moe?{_TEXT}&num_key_value_heads=2&num_experts=4&num_experts_per_tok=2&moe_intermediate_size=32",
        16,
    ),
    "DeepSeek-V3": (f"hf:deepseek_v3?{_TEXT}&num_key_value_heads=4&{_LATENT}", 16),
    "BERT": (f"hf:bert?{_TEXT}&max_position_embeddings=32", 16),
    "ViT": (
        f"hf:vit?{_TOWER}&image_size=[12,20]&patch_size=4&num_labels=5",
        None,
    ),
    "T5": ("hf:t5?num_layers=2&d_model=32&d_kv=8&num_heads=4&d_ff=64&vocab_size=96", 16),
    "CLIP": (f"hf:clip?projection_dim=16&text_config={_CLIP_TEXT}&vision_config={_CLIP_IMAGE}", 16),
    "Whisper": (f"hf:whisper?{_SPEECH}&vocab_size=96&max_target_positions=16&num_mel_bins=8", 16),
    "ResNet": (
        "hf:resnet?embedding_size=8&hidden_sizes=[16,32]&depths=[1,2]&layer_type=basic&num_labels=5",
        None,
    ),
    "ConvNeXt": ("hf:convnext?hidden_sizes=[8,16]&depths=[2,2]&num_stages=2&image_size=32&num_labels=5", None),
    "U-Net": ("tools.campaigns.handmade:unet", None),
    "DLRM": ("tools.campaigns.handmade:recommender", None),
    "MLP": ("tools.campaigns.handmade:perceptron", None),
    "MoE by hand": ("tools.campaigns.handmade:mixture", None),
}
"""Description and tokens of a sample."""
WRITTEN: dict[str, tuple[str, int | None]] = {
    "DiT by hand": ("tools.campaigns.written:diffusion", None),
    "Edges": ("tools.campaigns.written:edges", None),
    "Bags": ("tools.campaigns.written:bags", None),
    "Depths": ("tools.campaigns.written:depths", None),
    "Tagger": ("tools.campaigns.written:tagger", None),
}
"""Run by name, and not in the published table."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one family under one layout; ``error`` is empty where the program ran.

    Attributes:
        double: the largest error of the same plan in float64, where float32 is past a limit; negative: not run.
        alone: what one device alone is off by then, float32 against float64.
        verdict: in words.
    """

    mesh: str = ""
    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    error: str = ""
    double: float = -1.0
    alone: str = ""
    verdict: str = ""

    @property
    def is_within(self) -> bool:
        """Within the limits in float32."""
        return not self.error and self.loss <= LOSS_TOLERANCE and max(self.gradient, self.parameter) <= TENSOR_TOLERANCE

    @property
    def passed(self) -> bool:
        """Within the limits, or shown to be rounding."""
        return self.is_within or (not self.error and self.verdict.startswith("rounding"))


@dataclass(slots=True)
class Row:
    """One family: results by layout; of its live operators how many split, and the targets of the others."""

    spec: str
    results: dict[str, Result] = field(default_factory=dict)
    num_operators: int = 0
    num_split: int = 0
    whole: dict[str, int] = field(default_factory=dict)
    has_attention: bool = False
    has_experts: bool = False
    wall_s: float = 0.0

    @property
    def layouts(self) -> dict[str, tuple[str, ...]]:
        """Those that concern the family."""
        experts = EXPERT_LAYOUTS if self.has_experts else {}
        return LAYOUTS | experts | (SEQUENCE_LAYOUTS if self.has_attention else {})


def splits(graph: Graph, op: Op) -> bool:
    """True when some strategy on ``tp``, or the one that cuts the batch, splits the operator's work or its tensors."""
    operands = tuple(graph.spec(ref) for ref in op.operands)
    offered = rules.default_table().strategies(op, operands, axis="tp", size=Fraction(2), fallback=True)
    return any(t.is_split for s in offered for t in (*s.inputs, *s.outputs))


def said(error: BaseException) -> str:
    """The error in one line; one that is not ours is a defect and says so."""
    text = " ".join(str(error).split())
    return text[:300] + " ... " + text[-700:] if len(text) > 1000 else text or type(error).__name__


def attempt(layout: str, subject: VerifiedModel, graph: Graph, pool: WorkerPool) -> Result:
    """Searches under the layout's pins and verifies."""
    try:
        plan = api.search(
            graph,
            cluster=with_free_links(Cluster.parse(f"cpu:1x{RANKS}")),
            global_batch_size=DEFAULT_SAMPLES * RANKS,
            pins=(LAYOUTS | EXPERT_LAYOUTS | SEQUENCE_LAYOUTS)[layout],
            trials=64,
        )
        report: VerifyReport = verify(subject, plan, graph, pool=pool, run_timeout_s=180.0)
    except (AutoparError, *USER_FAILURES) as error:
        return Result(error=said(error))
    return result_of(plan, report)


def result_of(plan: Plan, report: VerifyReport) -> Result:
    """What a comparison found."""
    found = report.confirmation
    return Result(
        mesh=str(plan.mesh),
        loss=max(row.loss for row in report.rows),
        gradient=max(row.gradient for row in report.rows),
        parameter=max(row.parameter for row in report.rows),
        double=found.error if found is not None and found.rows else -1.0,
        alone="" if found is None else _three(found.alone),
        verdict=report.verdict,
    )


def _three(errors: Result | RankErrors) -> str:
    return f"{errors.loss:.0e}, {errors.gradient:.0e}, {errors.parameter:.0e}"


def run_family(name: str, pool: WorkerPool, layouts: Sequence[str] = (), row: Row | None = None) -> Row:
    """The layouts of one family that are named, all of them when none is; added to ``row``."""
    spec, length = (FAMILIES | WRITTEN)[name]
    start = time.perf_counter()
    row = Row(spec) if row is None else row
    try:
        subject = VerifiedModel(resolve_model(spec, sequence_length=length), masked=True)
        graph = subject.trace()
    except (AutoparError, *USER_FAILURES) as error:
        row.results = dict.fromkeys(LAYOUTS, Result(error=said(error)))
        return row
    whole = [op for op in graph.ops if not splits(graph, op)]
    row.num_operators, row.num_split = len(graph.ops), len(graph.ops) - len(whole)
    row.whole = dict(Counter(op.target for op in whole).most_common())
    row.has_attention = any(is_attention(op) or is_scores(op) for op in graph.ops)
    row.has_experts = any(op.target == "autopar.experts" for op in graph.ops)
    for layout in layouts or row.layouts:
        if layout in row.layouts:
            row.results[layout] = attempt(layout, subject, graph, pool)
    row.wall_s += time.perf_counter() - start
    return row


# --- the command ----------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Row]:
    """What earlier runs have kept."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Row(**{**row, "results": {layout: Result(**result) for layout, result in row["results"].items()}})
        for name, row in rows.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    known = LAYOUTS | EXPERT_LAYOUTS | SEQUENCE_LAYOUTS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", default=[], choices=list(FAMILIES | WRITTEN), metavar="NAME")
    parser.add_argument("--layout", action="append", default=[], choices=list(known), metavar="NAME")
    parser.add_argument("--results", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows = read(options.results) if options.results else {}
    with WorkerPool(RANKS, preload=PRELOAD) as pool:
        for name in options.family or FAMILIES:
            row = rows[name] = run_family(name, pool, options.layout, rows.get(name))
            sys.stdout.write(shown(name, row, options.layout))
            sys.stdout.flush()
            if options.results:
                kept = {name: asdict(row) for name, row in rows.items()}
                options.results.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    if rows.keys() == FAMILIES.keys() and not options.layout and (options.results or not options.family):
        from tools.campaigns.page import page  # which needs the names of this module

        PAGE.write_text(page({name: rows[name] for name in FAMILIES}), encoding="utf-8")
    wrong = [r for row in rows.values() for r in row.results.values() if not r.error and not r.passed]
    return int(bool(wrong))


def shown(name: str, row: Row, layouts: Sequence[str] = ()) -> str:
    """The results of a family as lines for a terminal."""
    lines = [f"{name}: {row.num_split} of {row.num_operators} operators split, {row.wall_s:.0f} s\n"]
    for layout in layouts or row.layouts:
        result = row.results.get(layout)
        if result is not None:
            text = result.error or f"{_three(result)} ({result.mesh}) {result.verdict}"
            lines.append(f"    {layout}: {text}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
