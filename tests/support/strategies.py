"""Hypothesis strategies shared by the tests: whole plans that keep every law of ``autopar.plan.check``."""

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from autopar.plan.mesh import I, Mesh, S
from autopar.plan.plan import (
    BF16,
    FP32,
    RECOMPUTES,
    AxisTyping,
    BlockLayout,
    BlockPlan,
    ModelInfo,
    Plan,
    SearchRecord,
    StagePlan,
)
from autopar.plan.prediction import Breakdown, Memory, Prediction

_SECONDS = st.floats(min_value=0, max_value=1e9, allow_subnormal=False)
_BYTES = st.integers(0, 2**50)
_TEXT = st.text(max_size=12)


_TYPES = st.one_of(st.just(I), st.integers(0, 3).map(S))
_NAMES = st.sampled_from(["split n", "invariant", "replicate", "linear 0"])


def _some(values: st.SearchStrategy[Any], most: int, least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=least, max_size=most).map(tuple)


@st.composite
def axis_typings(draw: st.DrawFn, axis: str) -> AxisTyping:
    parameters = draw(_some(_TYPES, 4))
    names = draw(st.sampled_from([(), tuple(f"p{i}.weight" for i in range(len(parameters)))]))
    given = {"strategies": draw(_some(_NAMES, 20)), "boundary": draw(_some(_TYPES, 2))}
    return AxisTyping(axis=axis, parameters=parameters, parameter_names=names, **given)


LAYOUTS = st.builds(
    BlockLayout,
    block_hash=st.text("0123456789abcdef", min_size=1, max_size=16),
    typings=st.tuples(axis_typings("batch"), axis_typings("tp")),
)


def _of(kind: type, values: st.SearchStrategy[Any], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A dataclass whose fields are such values, but for those that are given and texts."""
    names = [field.name for field in fields(kind) if field.name not in given]
    return st.builds(kind, **dict.fromkeys(names, values), **given)


@st.composite
def predictions(draw: st.DrawFn, pp: int, num_stages: int) -> Prediction:
    step = draw(_SECONDS)
    times = tuple((draw(_SECONDS), draw(_SECONDS)) for _ in range(num_stages))
    return Prediction(
        step_time_s=step,
        step_time_interval_s=(step * 0.9, step),
        peak_memory_bytes=draw(_BYTES),
        memory_limit_bytes=draw(_BYTES),
        mfu=draw(st.floats(0, 1)),
        tokens_per_s=draw(_SECONDS),
        breakdown=draw(_of(Breakdown, _SECONDS)),
        memory=tuple(draw(_of(Memory, _BYTES, pp_rank=st.just(rank), group=st.just(0))) for rank in range(pp)),
        stage_times=draw(st.sampled_from([(), times])),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan: small degrees, arbitrary numbers and texts."""
    degree, count = st.integers(1, 3), st.integers(0, 10**6)
    zero = draw(st.integers(0, 3))
    mesh = Mesh(pp=draw(degree), dp_replicate=draw(degree), dp_shard=draw(degree) if zero else 1, cp=1, tp=draw(degree))
    virtual = draw(st.integers(1, 2)) if mesh.pp > 1 else 1
    schedule = (
        "none" if mesh.pp == 1 else "Interleaved1F1B" if virtual > 1 else draw(st.sampled_from(["GPipe", "1F1B"]))
    )
    sizes = draw(st.lists(st.integers(1, 3), min_size=mesh.pp * virtual, max_size=mesh.pp * virtual))
    found = draw(_some(LAYOUTS, 2, least=1))
    micro_batch_size = draw(st.integers(1, 4))
    numbers, modes = st.integers(0, len(found) - 1), st.sampled_from(RECOMPUTES)
    blocks = tuple(
        BlockPlan(index=i, label=draw(_TEXT), layout=draw(numbers), recompute=draw(modes)) for i in range(sum(sizes))
    )
    stages = tuple(
        StagePlan(index=i, start=sum(sizes[:i]), stop=sum(sizes[: i + 1]), pp_rank=i % mesh.pp)
        for i in range(len(sizes))
    )
    return Plan(
        model=ModelInfo(
            name=draw(_TEXT), fingerprint=draw(_TEXT), num_parameters=draw(_BYTES), flops_per_sample=draw(_SECONDS),
            tokens_per_sample=draw(st.integers(1, 10**6)),
        ),
        cluster=f"cpu:1x{mesh.world_size}",
        mesh=mesh,
        global_batch_size=micro_batch_size * mesh.data * draw(st.integers(1, 8)),
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        virtual_stages=virtual,
        zero_stage=zero,
        precision=draw(st.sampled_from([FP32, BF16])),
        optimizer=draw(st.sampled_from(["adamw", "sgd"])),
        prelude=draw(_some(_TEXT, 3)),
        layouts=found,
        blocks=blocks,
        stages=stages,
        predicted=draw(predictions(mesh.pp, len(sizes))),
        search=draw(
            _of(SearchRecord, _SECONDS, candidates=count, evaluated=count, gap=st.floats(0, 1), reasons=_some(_TEXT, 2))
        ),
        pins=draw(_some(_TEXT, 2)),
        notes=draw(_some(_TEXT, 2)),
    )  # fmt: skip
