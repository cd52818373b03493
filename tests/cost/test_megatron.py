"""Activations of a GPT layer in half precision, byte by byte, against section 4 of Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models": its formulas, in :func:`paper`, with a line for each thing that the models here have not
or that the paper leaves out, are what is predicted."""

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.blocks.block_cost import BlockCost
from autopar.validate.practice import Site
from autopar.validate.runs import Run
from autopar.validate.session import Session
from tests.support.published import read_runs

B, S, H, A, T = 2, 512, 1024, 8, 4  # so large that splitting rows between blocks pays for its launches
SBH, SCORES = S * B * H, A * S * S * B

SITES = [Site(source="megatron", practices=frozenset({"regathers"})), Site(source="runtime")]
"""Megatron gathers inputs of linear layers again in backward; the runtime of autopar keeps them."""


def run(name: str, *, tp: int = 1, rows: bool = False, recompute: str = "none", attention: str = "scores") -> Run:
    """A row of the table: ``name`` picks its site; ``rows``: sequence parallelism."""
    made = read_runs(Path(__file__).parents[1] / "validate" / "runs.csv")[1]
    return replace(
        made, source=name, layers=5, hidden=H, ffn=4 * H, heads=A, kv_heads=A, seq=S, devices=8, tp=tp, pp=1, cp=1,
        virtual_stages=1, dp=8 // tp, micro_batch=B, global_batch=8 * B, recompute=recompute, sequence_parallel=rows,
        attention=attention, precision="bf16",
    )  # fmt: skip


RUNS = {
    "whole": run("runtime"),
    "whole, selective": run("runtime", recompute="selective"),
    "whole, fused": run("runtime", attention="flash"),
    "tensor": run("runtime", tp=T),
    "tensor, selective": run("runtime", tp=T, recompute="selective"),
    "tensor, fused": run("runtime", tp=T, attention="flash"),
    "sequence": run("megatron", tp=T, rows=True),
    "sequence, selective": run("megatron", tp=T, rows=True, recompute="selective"),
    "sequence, fused": run("megatron", tp=T, rows=True, attention="flash"),
    "sequence, kept": run("runtime", tp=T, rows=True),
}


@pytest.fixture(scope="module")
def layers() -> dict[str, BlockCost]:
    """The inner layer of each run on one rank."""
    session = Session(list(RUNS.values()), sites=SITES)
    found = {}
    for name, (structure,) in zip(RUNS, session.structures, strict=True):
        inner = structure.members.index(max(structure.members))
        found[name] = structure.works[inner].shape
    return found


def paper(kind: str) -> int:
    whole, scores = 34 * SBH, 5 * SCORES
    tensor = 10 * SBH + 24 * SBH // T
    return {
        "whole": whole + scores, "whole, selective": whole, "tensor": tensor + scores // T, "tensor, selective": tensor,
        "sequence": (whole + scores) // T, "sequence, selective": whole // T,
    }[kind]  # fmt: skip


# what the models of validate.families have not
MASKS_OF_HIDDEN = -2 * SBH  # of the dropouts behind attention and feed-forward: a byte for each element
MASK_OF_SCORES = -SCORES  # of the dropout behind the softmax
SCORES_AFTER_DROPOUT = -2 * SCORES  # its output in half precision: the softmax's own output multiplies the values
# what the paper leaves out
STATISTICS_OF_NORMS = 2 * 2 * S * B * 4  # mean and deviation of each token in fp32, of two norms
STATISTICS_OF_ATTENTION = A * S * B * 4  # of fused attention: the log of the sum of each row, in fp32


PARTS = [("whole", 1, 1), ("tensor", 1, T), ("sequence", T, T)]
"""Into how many parts hidden values outside of products are split, and scores: of tensor parallel ranks each has the whole of norms."""


@pytest.mark.parametrize(("kind", "rows", "heads"), PARTS)
def test_a_layer_keeps_what_the_paper_counts(layers: dict[str, BlockCost], kind: str, rows: int, heads: int) -> None:
    """Fused attention keeps a number for each row of scores; its output is the input of the projection, kept once, as in the paper."""
    without_dropout = MASKS_OF_HIDDEN // rows + (MASK_OF_SCORES + SCORES_AFTER_DROPOUT) // heads
    assert layers[kind].saved_bytes == paper(kind) + without_dropout + STATISTICS_OF_NORMS // rows
    selective = paper(f"{kind}, selective") + MASKS_OF_HIDDEN // rows + STATISTICS_OF_NORMS // rows
    assert layers[f"{kind}, selective"].saved_bytes == selective
    assert layers[f"{kind}, fused"].saved_bytes == selective + STATISTICS_OF_ATTENTION // heads
    for name in (kind, f"{kind}, fused"):
        assert layers[name].kept_bytes("full") == 2 * SBH // rows


def test_sequence_parallel_of_the_runtime_keeps_gathered_inputs(layers: dict[str, BlockCost]) -> None:
    """Of queries, keys and values, and of the feed-forward: whole instead of a part."""
    gathered = 2 * (2 * SBH - 2 * SBH // T)
    assert layers["sequence, kept"].saved_bytes == layers["sequence"].saved_bytes + gathered


# --- Llama-13B, by category

GB, GIB = 10**9, 2**30
LLAMA_13B = {"parameters": 26, "gradients": 26, "Adam with fp32 parameters": 156}
"""GB, as surveys of training state them for batch 1, sequence 1024, half precision: 2, 2 and 12 bytes of 13 billion."""

ACTIVATIONS_13B = 14.5
"""Of the same case, with the scores stored: 40 layers of the paper's s b h (34 + 5 a s / h), in GiB."""


def of_13b(family: str, ffn: int) -> Run:
    return replace(
        run("runtime"), family=family, layers=40, hidden=5120, ffn=ffn, heads=40, kv_heads=40, vocab=32000, seq=1024,
        devices=1, devices_per_node=1, dp=1, zero=0, micro_batch=1, global_batch=2, precision="fp16",
    )  # fmt: skip


def test_llama_13b_by_category() -> None:
    """Tolerances are the half of the last digit that is stated; the model has 13.016 billion parameters."""
    llama, gpt = Session([of_13b("llama", 13824), of_13b("gpt", 4 * 5120)], sites=SITES).predictions()
    numel = 40 * (4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120) + 2 * 32000 * 5120 + 5120
    held = llama.memory[0]
    half = held.parameters - 4 * numel  # parameters are predicted in half and in single precision
    found = {"parameters": half, "gradients": held.gradients, "Adam with fp32 parameters": 4 * numel + held.optimizer}
    assert found == {"parameters": 2 * numel, "gradients": 2 * numel, "Adam with fp32 parameters": 12 * numel}
    for what, size in LLAMA_13B.items():
        assert abs(found[what] / GB - size) <= 0.5, what
    # the surveys' layer is GPT's with dropout
    s, h, a = 1024, 5120, 40
    assert abs(40 * (34 * s * h + 5 * a * s * s) / GIB - ACTIVATIONS_13B) <= 0.05
    without_dropout = -2 * s * h - 3 * a * s * s
    layers = 40 * (34 * s * h + 5 * a * s * s + without_dropout + 2 * 2 * s * 4)
    end = 2 * s * h + 2 * s * 4 + 2 * s * h + 4 * s * 32000  # last norm with its input, head's input, log-probabilities
    batch = 2 * 8 * s + 4  # ids, labels and the count of tokens
    assert gpt.memory[0].activations == layers + end + batch
