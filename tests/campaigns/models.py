"""Which model families work: each is searched, verified against one device on 4 local ranks, and put in a table.

Run: ``python -m tests.campaigns.models [FAMILY ...]``; without arguments it writes ``docs/models.md``. Plans are made
as ``autopar verify MODEL --cluster cpu:1x4`` makes them: in float32, as if links were free.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autopar import api, rules
from autopar.cli.models import DEFAULT_SAMPLES, VerifiedModel, with_free_links
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.graph.ir import Graph, Op
from autopar.models import USER_FAILURES, resolve_model
from autopar.runtime.verify import (
    LOSS_TOLERANCE,
    PRELOAD,
    TENSOR_TOLERANCE,
    VerifyReport,
    _worst,
    adamw,
    loss_of,
    verify,
)
from autopar.runtime.workers import WorkerPool

RANKS = 4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "search": (),
    "tp2 x dp2": ("tp=2", "pp=1"),
    "pp2 x tp2": ("pp=2", "tp=2"),
    "pp2 x dp2": ("pp=2", "tp=1"),
}

_TEXT = "num_hidden_layers=2&hidden_size=32&num_attention_heads=4&intermediate_size=64&vocab_size=96"
_GPT = "n_layer=2&n_embd=32&n_head=4&vocab_size=97&n_positions=32"
_TOWER = "num_hidden_layers=2&hidden_size=32&num_attention_heads=4&intermediate_size=64"
_SIZES = '"num_hidden_layers":2,"hidden_size":32,"num_attention_heads":4,"intermediate_size":64'
_CLIP_TEXT = f'{{{_SIZES},"vocab_size":96,"max_position_embeddings":16,"eos_token_id":2}}'
_CLIP_IMAGE = f'{{{_SIZES},"image_size":16,"patch_size":4}}'
_SPEECH = (
    "&".join(
        f"{side}_{key}={value}"
        for side in ("encoder", "decoder")
        for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    )
    + "&d_model=32&max_source_positions=16"
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
    "BERT": (f"hf:bert?{_TEXT}&max_position_embeddings=32", 16),
    "ViT": (
        f"hf:vit?{_TOWER}&image_size=16&patch_size=4&num_labels=5",
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
    "U-Net": ("tests.campaigns.handmade:unet", None),
    "DLRM": ("tests.campaigns.handmade:recommender", None),
    "MLP": ("tests.campaigns.handmade:perceptron", None),
}
"""Description and tokens of a sample."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one family under one layout; ``error`` is empty where the program ran."""

    mesh: str = ""
    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.loss <= LOSS_TOLERANCE and max(self.gradient, self.parameter) <= TENSOR_TOLERANCE


@dataclass(slots=True)
class Row:
    """One family: results by layout; of its live operators how many split, and the targets of the others.

    ``rounding``: where a layout is past the limits, what one device alone does in float32 against float64.
    """

    spec: str
    results: dict[str, Result] = field(default_factory=dict)
    num_operators: int = 0
    num_split: int = 0
    whole: Counter[str] = field(default_factory=Counter)
    rounding: str = ""


def splits(graph: Graph, op: Op) -> bool:
    """True when some strategy on ``tp``, or the one that cuts the batch, splits the operator's work or its tensors."""
    operands = tuple(graph.spec(ref) for ref in op.operands)
    offered = rules.strategies(op, operands, axis="tp", size=2, fallback=True)
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
            pins=LAYOUTS[layout],
            trials=64,
        )
        report: VerifyReport = verify(subject, plan, graph, pool=pool, timeout_s=90.0)
    except (AutoparError, *USER_FAILURES) as error:
        return Result(error=said(error))
    return Result(
        mesh=str(plan.mesh),
        loss=max(row.loss for row in report.rows),
        gradient=max(row.gradient for row in report.rows),
        parameter=max(row.parameter for row in report.rows),
    )


def run_family(name: str, pool: WorkerPool) -> Row:
    """Every layout of one family."""
    spec, length = FAMILIES[name]
    row = Row(spec)
    try:
        subject = VerifiedModel(resolve_model(spec, sequence_length=length), masked=True)
        graph = subject.trace()
    except (AutoparError, *USER_FAILURES) as error:
        row.results = dict.fromkeys(LAYOUTS, Result(error=said(error)))
        return row
    whole = [op for op in graph.ops if not splits(graph, op)]
    row.num_operators, row.num_split = len(graph.ops), len(graph.ops) - len(whole)
    row.whole = Counter(op.target for op in whole)
    for layout in LAYOUTS:
        row.results[layout] = attempt(layout, subject, graph, pool)
    if any(not result.error and not result.passed for result in row.results.values()):
        row.rounding = own_rounding(subject)
    return row


def own_rounding(subject: VerifiedModel) -> str:
    """The largest relative errors of one device in float32 against itself in float64, measured as verify does."""
    found: dict[torch.dtype, list[dict[str, torch.Tensor]]] = {}
    for dtype in (torch.float32, torch.float64):
        model = subject.build().to(dtype)
        optimizer = adamw(model.parameters())
        for step in range(3):
            batch = subject.make_batch(DEFAULT_SAMPLES * RANKS, seed=step, padded=True)
            optimizer.zero_grad()
            loss_of(model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()})).backward()
            if step == 0:
                found[dtype] = [{n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}]
            optimizer.step()
        found[dtype].append({n: p.detach().double() for n, p in model.named_parameters() if p.grad is not None})
    worst = (_worst(mine, truth) for mine, truth in zip(found[torch.float32], found[torch.float64], strict=True))
    return "; ".join(f"{error:.0e} ({name})" for name, error in worst)


# --- the page -------------------------------------------------------------------------------------

_HEAD = """# Model families

Written by `python -m tests.campaigns.models`; do not edit. Each family at a small size, traced with a padding mask
where it knows one, is searched as `autopar verify MODEL --cluster cpu:1x4` does (float32, links as if free), run on
four local ranks for three AdamW steps and compared with the same model on one device. The number is the largest
relative error on any rank of losses, of the first gradients, and of the parameters in the end; the limits are {loss:g}
for losses and {tensor:g} for the others. `search` is the plan that the search picks when nothing is pinned; its mesh
stands in brackets.

| family | search | tp2 x dp2 | pp2 x tp2 | pp2 x dp2 | operators that split |
|---|---|---|---|---|---|
"""


def page(rows: Mapping[str, Row]) -> str:
    """The table, what does not work and why, and the operators that only replicate."""
    lines = [_HEAD.format(loss=LOSS_TOLERANCE, tensor=TENSOR_TOLERANCE)]
    for name, row in rows.items():
        share = f"{row.num_split} of {row.num_operators}" if row.num_operators else "not traced"
        cells = [_cell(row.results[layout], layout) for layout in LAYOUTS]
        lines.append(f"| {name} | {' | '.join(cells)} | {share} |\n")
    split = sum(row.num_split for row in rows.values())
    total = max(sum(row.num_operators for row in rows.values()), 1)
    lines.append(f"\nOf all {total} live operators {split} ({100 * split / total:.1f}%) have a strategy that splits.\n")
    lines.append("\n## What does not work\n\n")
    failures = _failures(rows)
    lines += failures or ["Nothing in the table.\n"]
    lines.append("\n## Operators that are repeated on every rank\n\n")
    lines += [
        f"- {name}: {', '.join(f'`{target}` ({count})' for target, count in row.whole.most_common())}\n"
        for name, row in rows.items()
        if row.whole
    ]
    lines.append("\n## Descriptions\n\n")
    lines += [f"- {name}: `{row.spec}`\n" for name, row in rows.items()]
    return "".join(lines)


def _cell(result: Result, layout: str) -> str:
    if result.error:
        return "no"
    numbers = f"{result.loss:.0e}, {result.gradient:.0e}, {result.parameter:.0e}"
    text = numbers if result.passed else f"**past** {numbers}"
    return f"{text} ({result.mesh})" if layout == "search" else text


def _failures(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        if row.rounding:
            lines.append(
                f"- {name}: past the limits; one device alone, float32 against float64, is off by {row.rounding} in the"
                " first gradients and in the parameters\n"
            )
        reasons: dict[str, list[str]] = {}
        for layout, result in row.results.items():
            if result.error:
                reasons.setdefault(result.error, []).append(layout)
        lines += [f"- {name}, {', '.join(layouts)}: {reason}\n" for reason, layouts in reasons.items()]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    options = parser.parse_args(arguments)
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    rows: dict[str, Row] = {}
    with WorkerPool(RANKS, preload=PRELOAD) as pool:
        for name in options.families or FAMILIES:
            start = time.perf_counter()
            row = rows[name] = run_family(name, pool)
            cells = " | ".join(_cell(row.results[layout], layout) for layout in LAYOUTS)
            seconds = time.perf_counter() - start
            sys.stdout.write(f"{name:10} {cells} | {row.num_split} of {row.num_operators} | {seconds:.0f} s\n")
            sys.stdout.write("".join(f"    {line}" for line in _failures({name: row})))
            sys.stdout.flush()
            if not options.families:
                PAGE.write_text(page(rows), encoding="utf-8")
    return int(any(not result.error and not result.passed for row in rows.values() for result in row.results.values()))


if __name__ == "__main__":
    sys.exit(main())
