"""What the software of published runs does where the planner is free.

Which strategies its tensor parallelism has, and what its recompute makes again in backward.
"""

from __future__ import annotations

from autopar.cost.operators.work import LINEAR
from autopar.graph.graph import Graph, Op, Ref
from autopar.rules.strategy import Strategy
from autopar.validate.foreign_kernels import LOSSES

TABLE = Ref("p_embedding_weight")
"""The vocabulary of the models of ``families.py``."""

HEAD = Ref("p_head_weight")

DROPOUT = "autopar.dropout"
NORMS = ("aten.layer_norm.default", "aten.rms_norm.default")


def as_megatron(
    sequence: int,
    split_rows: bool | None,
    op: Op,
    offered: tuple[Strategy, ...],
    *,
    whole_vocabulary: bool = False,
) -> tuple[Strategy, ...]:
    """Keeps the strategies on ``tp`` that Megatron and torchtitan have; the planner's own are more.

    Weights of linear layers and the vocabulary are split; the planner may hold one whole and split rows of samples or of
    the sequence.

    Args:
        sequence: tokens of a sample.
        split_rows: sequence parallelism: norms run on parts of the sequence [batch, sequence, ...]; False: no activation
            is split along batch or sequence, and dropout has all of [batch, sequence, hidden]; None: as is fastest.
        op: the operator.
        offered: its strategies.
        whole_vocabulary: embedding and loss are not split, nor is the head with ``split_rows`` False.
    """
    if whole_vocabulary and (
        op.target in LOSSES or TABLE in op.operands or (HEAD in op.operands and split_rows is False)
    ):
        return tuple(s for s in offered if not any(t.is_split for t in (*s.inputs, *s.outputs)))
    if op.target in LINEAR or TABLE in op.operands:
        weight = 1 if op.target in LINEAR else op.operands.index(TABLE)
        offered = tuple(s for s in offered if s.inputs[weight].is_split)
    if op.target == DROPOUT:  # of whole sums, not of each rank's part of one
        offered = tuple(s for s in offered if s.outputs[0].kind != "P")
    shape = op.spec.shape
    if _of_chained_norm(op):
        offered = tuple(
            s for s in offered if s.outputs[0].kind != "P" and (not s.outputs[0].is_split or s.outputs[0].dim < 2)
        )
    if split_rows and op.target in NORMS and len(shape) == 3:
        return tuple(s for s in offered if s.outputs[0].is_split and s.outputs[0].dim == 1)
    if split_rows is False and len(shape) >= 3 and shape[1] == sequence:
        whole = 3 if op.target == DROPOUT and len(shape) == 3 else 2
        return tuple(s for s in offered if not any(t.is_split and t.dim < whole for t in s.outputs))
    return offered


def _of_chained_norm(op: Op) -> bool:
    """Whether an operator is of a norm, of whose weight and rows no rank has a part, as where it is one operator."""
    if op.target in ("aten.mean.dim", "aten.to.dtype"):
        return len(op.spec.shape) == 3
    return op.target == "aten.mul.Tensor" and any("norm" in r.name and r.name.endswith("_weight") for r in op.operands)


def cheap(op: Op) -> bool:
    """What op-level selective checkpointing computes again: all but products, fused attention and collectives."""
    return op.target not in LINEAR and "attention" not in op.target and not op.target.startswith("autopar.")


def second_products(graph: Graph) -> frozenset[str]:
    """Names of every second linear layer of each block (torchtitan: "every second mm"), in order of the forward.

    The head, alone in its block, is none of them.
    """
    layers = ([op for op in graph.block_ops(block) if op.target in LINEAR] for block in graph.blocks)
    return frozenset(op.name for linear in layers for op in linear[1::2])


def attention_core(op: Op) -> bool:
    """What Megatron's selective recompute computes again: scores, softmax and their product with the values, or the fused kernel."""
    scores = len(op.spec.shape) == 4 and op.target in ("aten.div.Tensor", "aten.masked_fill.Scalar", "aten.to.dtype")
    return (
        scores
        or "attention" in op.target
        or op.target
        in (
            "aten.softmax.int",
            "aten.matmul.default",
            "aten.dropout.default",
            "autopar.dropout",
        )
    )


def regathered(op: Op) -> bool:
    """Activations gathered over ``tp``, where linear layers keep their own part and gather it again in backward.

    Megatron does so with sequence parallelism, beside the product that gives the input's gradient (Korthikanti et al.
    2022, section 4.2.2), so that its time is not counted twice.
    """
    return op.target == "autopar.all_gather" and op.args[1] == "tp"
