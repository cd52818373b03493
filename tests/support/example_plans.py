"""Two hand-made plans, small enough to read, for printing and for broken copies; and what the actions of a schedule wait for."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.plan.mesh import I, Mesh, S, Type
from autopar.plan.plan import BF16, FP32, AxisTyping, BlockLayout, BlockPlan, ModelInfo, Plan, SearchRecord, StagePlan
from autopar.plan.prediction import Breakdown, Memory, Prediction
from autopar.plan.schedule import schedule_numbers

_GIB = 2**30


def _layout(
    block_hash: str, strategies: str, parameters: dict[str, Type], boundary: tuple[Type, ...] = ()
) -> BlockLayout:
    """Samples split on the batch axis; strategies and types at rest of ``tp``."""
    on_tp, names = tuple(strategies.split(", ")), tuple(parameters)
    batch = AxisTyping(
        axis="batch", strategies=("split b",) * len(on_tp), parameters=(I,) * len(names), parameter_names=names
    )
    types = tuple(parameters.values())
    tp = AxisTyping(axis="tp", strategies=on_tp, parameters=types, parameter_names=names, boundary=boundary)
    return BlockLayout(block_hash=block_hash, typings=(batch, tp))


EMBEDDING = _layout("e000000000000000", "vocabulary", {"model.embed_tokens.weight": S(0)}, (S(1),))
LAYER_PARAMETERS = {
    "input_layernorm.weight": I, "self_attn.q_proj.weight": S(0), "self_attn.k_proj.weight": S(0),
    "self_attn.v_proj.weight": S(0), "self_attn.o_proj.weight": S(1), "post_attention_layernorm.weight": I,
    "mlp.gate_proj.weight": S(0), "mlp.up_proj.weight": S(0), "mlp.down_proj.weight": S(1),
}  # fmt: skip
LAYER_STRATEGIES = "split s, split n, split n, split n, split h, split k, split s, split n, split k"
LAYER = _layout("a000000000000000", LAYER_STRATEGIES, LAYER_PARAMETERS, (S(1),))
HEAD = _layout("f000000000000000", "split s, split n, vocabulary", {"model.norm.weight": I, "lm_head.weight": S(0)})


def llama_plan() -> Plan:
    """Ten blocks on two pipeline stages of four tensor-parallel and two sharded data ranks."""
    labels = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(8)), "model.norm")
    blocks = tuple(
        BlockPlan(index=i, label=label, layout=(i > 0) + (i > 8), recompute="full" if 1 <= i <= 4 else "none")
        for i, label in enumerate(labels)
    )
    return Plan(
        model=ModelInfo(
            name="llama:layers=8", fingerprint="0123456789abcdef", num_parameters=2_200_000_000,
            flops_per_sample=5.4e13, tokens_per_sample=4096,
        ),
        cluster="h100-sxm5-80gb:2x8",
        mesh=Mesh(pp=2, dp_shard=2, tp=4),
        global_batch_size=64,
        micro_batch_size=2,
        schedule="1F1B",
        virtual_stages=1,
        zero_stage=1,
        precision=BF16,
        optimizer="adamw",
        prelude=("split b", "replicate"),
        layouts=(EMBEDDING, LAYER, HEAD),
        blocks=blocks,
        stages=(StagePlan(index=0, start=0, stop=5, pp_rank=0), StagePlan(index=1, start=5, stop=10, pp_rank=1)),
        predicted=Prediction(
            step_time_s=0.45,
            step_time_interval_s=(0.41, 0.52),
            peak_memory_bytes=31 * _GIB,
            peak_memory_interval_bytes=(27 * _GIB, 36 * _GIB),
            memory_limit_bytes=74 * _GIB,
            mfu=0.4873,
            tokens_per_s=582_542.2,
            breakdown=Breakdown(
                compute_s=0.3, recompute_s=0.04, tensor_parallel_s=0.05, data_parallel_s=0.01, pipeline_s=0.002,
                bubble_s=0.038, optimizer_s=0.01,
            ),
            memory=tuple(
                Memory(
                    pp_rank=rank, parameters=2 * _GIB, gradients=2 * _GIB, optimizer=4 * _GIB,
                    activations=activations * _GIB, transient=transient * _GIB, reserved=2 * _GIB,
                )
                for rank, (activations, transient) in enumerate(((12, 3), (15, 6)))
            ),
            stage_times=((0.008, 0.018), (0.008, 0.016)),
        ),
        search=SearchRecord(
            wall_time_s=12.5,
            candidates=180,
            evaluated=42,
            lower_bound_s=0.44,
            gap=0.0222,
            reasons=("tp=4 before tp=8: the reductions of tp=8 take 0.03 s more than its smaller stages save",),
        ),
        pins=("tp<=4",),
        notes=("operator mylib.custom has no rule: it is replicated on tp and costs 0.001 s",),
    )  # fmt: skip


def single_plan() -> Plan:
    """The same model on one CPU rank."""
    base = llama_plan()
    predicted = replace(
        base.predicted, peak_memory_bytes=29 * _GIB, peak_memory_interval_bytes=(), memory_limit_bytes=28 * _GIB,
        memory=base.predicted.memory[:1], stage_times=(),
    )  # fmt: skip
    return replace(
        base,
        cluster="cpu:1x1",
        mesh=Mesh(),
        schedule="none",
        zero_stage=0,
        precision=FP32,
        stages=(StagePlan(index=0, start=0, stop=10, pp_rank=0),),
        layouts=tuple(replace(layout, typings=layout.typings[:1]) for layout in base.layouts),
        predicted=predicted,
        pins=(),
        notes=(),
    )


def at_rest(plan: Plan, axis: str = "tp") -> dict[str, object]:
    return {
        name: kind
        for layout in plan.layouts
        for typing in layout.typings
        if typing.axis == axis
        for name, kind in zip(typing.parameter_names, typing.parameters, strict=True)
    }


class Action(NamedTuple):
    """Forward (``F``) or backward (``B``) of one micro-batch on one stage; prints as torch prints it."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def schedule_actions(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each pipeline rank, in order.

    >>> for rank in schedule_actions("1F1B", 2, 1, 3):
    ...     print(*rank)
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    numbers = schedule_numbers(name, pp, virtual_stages, num_micro_batches)
    stages, rest = np.divmod(numbers, 2 * num_micro_batches)
    backwards, batches = np.divmod(rest, num_micro_batches)
    rows = zip(stages.tolist(), backwards.tolist(), batches.tolist(), strict=True)
    return tuple(tuple(Action(s, "B" if b else "F", i) for s, b, i in zip(*row, strict=True)) for row in rows)


def dependencies(action: Action, last_stage: int) -> tuple[Action, ...]:
    """What must have finished before, on any rank: the stage before for F, the stage after (or the own F) for B."""
    if action.kind == "F":
        return (Action(action.stage - 1, "F", action.micro_batch),) if action.stage else ()
    if action.stage == last_stage:
        return (Action(action.stage, "F", action.micro_batch),)
    return (Action(action.stage + 1, "B", action.micro_batch),)
