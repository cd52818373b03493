"""The language of pins, as a table: what each kind is written like, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.util.formatting import plain_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PinKind:
    """One kind of pin.

    Attributes:
        form: how it is written; ``OP`` is one of ``= != < <= > >=``.
        holds: what it holds.
        example: a pin.
    """

    form: str
    holds: str
    example: str


_ROWS = (
    ("tp OP N", "ranks that split tensors", "tp<=4"),
    ("pp OP N", "stages' ranks of the pipeline", "pp=2"),
    ("cp OP N", "ranks that split the sequence", "cp=2"),
    ("dp OP N", "data ranks", "dp=8"),
    ("dp_shard OP N, dp_replicate OP N", "data ranks that split states, and copies of these groups", "dp_shard=4"),
    ("ep OP N, ep_data OP N", "ranks that experts are split over, and how many of them are data ranks", "ep=4"),
    ("zero OP N", "ZeRO stage, 0 to 3", "zero=1"),
    ("micro_batch OP N", "samples that a data rank takes at once", "micro_batch>=2"),
    ("num_micro_batches OP N", "micro-batches of a step", "num_micro_batches=8"),
    ("schedule=NAME", "the pipeline's schedule: GPipe, 1F1B, Interleaved1F1B; also !=", "schedule=1F1B"),
    ("virtual_stages OP N", "stages of each pipeline rank", "virtual_stages=2"),
    ("stage@BLOCKS=N", "the stage of blocks, from 0", "stage@layers.0-7=0"),
    ("recompute=MODE[@BLOCKS]", "none, selective or full; of all blocks, or of some", "recompute=full@layers.0-11"),
    ("offload=WHAT", "none, optimizer, activations or activations@BLOCKS on the host", "offload=optimizer"),
    ("PARAMETER=tp:TYPE", "how parameters lie on tp, by a pattern of names: S(d) split, I whole", "*.up_proj.weight=tp:S(0)"),
    ("cp_attention=KIND", "how attention runs under cp: gather, ulysses, ring; also !=", "cp_attention=ring"),
    ("vocab_multiple OP N", "each rank's rows of a vocabulary are padded to a multiple", "vocab_multiple=128"),
    ("bucket_bytes OP N", "gradients that are summed together", "bucket_bytes=26214400"),
    ("precision=NAME", "the precision; also !=", "precision=bf16"),
    ("groups=I-J", "order of the node groups of a mixed cluster, from 0; also !=", "groups=1-0"),
    ("data_shares=A-B", "samples that a rank of each node group takes at once, or equal; also !=", "data_shares=3-1"),
    ("opaque=NAME", "a module runs as it is written: its path, a pattern, a class", "opaque=encoder.router"),
)  # fmt: skip

PIN_KINDS = tuple(PinKind(form=form, holds=holds, example=example) for form, holds, example in _ROWS)


def render_pins() -> str:
    """A row for each kind."""
    rows = [(kind.example, kind.form, kind.holds) for kind in PIN_KINDS]
    head = ("example", "form", "what it holds")
    table = plain_table(head, rows, left=head, width=140, indent=0)
    return (
        f"{table}\n\nOP is one of = != < <= > >=. BLOCKS is a dotted path whose parts may be * or a range: it names the blocks whose\n"
        "label contains it. Several pins go in one --pin with commas, or in a file: --pin @FILE, one a line, # before a remark."
    )


def pins_summary() -> dict[str, dict[str, str]]:
    """The same as JSON values, by example."""
    return {kind.example: {"form": kind.form, "holds": kind.holds} for kind in PIN_KINDS}
