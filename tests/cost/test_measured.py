import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.model import CostModel
from autopar.cost.operators.operator_times import Measured, OpTime, decode, encode, key_of, measurement_note, op_time
from autopar.errors import UsageError
from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.hardware.cluster import Cluster
from autopar.hardware.link import OperatorTable, OperatorTime
from autopar.hardware.read import load_profile
from autopar.plan.plan import FP32
from autopar.util.toml import as_table
from tests.support.planner.graphs import spec
from tests.support.said import refuses

CPU = Cluster.parse("cpu:1x1").devices[0]
X, W = Ref("x"), Ref("w")


def linear(rows: int) -> tuple[Op, tuple[TensorSpec, ...]]:
    op = Op(name="any", target="aten.linear.default", args=(X, W), outputs=(spec(rows, 64),))
    return op, (spec(rows, 128), spec(64, 128))


KNOWN = ((64, 1e-3, 3e-3), (1024, 5e-3, 2e-2))
TIMES = tuple(OperatorTime(call=encode(*linear(n)), forward_s=f, backward_s=b) for n, f, b in KNOWN)
TABLE = OperatorTable(times=TIMES, provenance="example")


def find(rows: int, measured: Measured) -> tuple[OpTime, str]:
    op, operands = linear(rows)
    return measured.find(op, operands, op_time(op, operands, CPU))


@given(st.lists(st.integers(65, 1023), min_size=2, max_size=8))
def test_between_measured_sizes_time_rises_from_one_to_the_other(rows: list[int]) -> None:
    measured = Measured(TABLE, CPU)
    found = [find(n, measured) for n in sorted(rows)]
    assert {source for _, source in found} == {"interpolated"}
    for part, low, high in (("forward_s", 1e-3, 5e-3), ("backward_s", 3e-3, 2e-2)):
        times = [low, *(getattr(time, part) for time, _ in found), high]
        assert times == sorted(times)


def test_beyond_measured_sizes_the_roofline_is_scaled_and_other_kinds_keep_it() -> None:
    measured = Measured(TABLE, CPU)
    for rows, nearest in ((8, 64), (8192, 1024)):
        (time, source), (known, _) = find(rows, measured), find(nearest, measured)
        here, there = op_time(*linear(rows), CPU), op_time(*linear(nearest), CPU)
        assert source == "scaled"
        assert time.forward_s / here.forward_s == pytest.approx(known.forward_s / there.forward_s)
    measured = Measured(TABLE, CPU)
    frozen = linear(64)[0], (spec(64, 128), spec(64, 128, grad=False))
    view = Op(name="v", target="aten.view.default", args=(X, (8, 8)), outputs=(spec(8, 8),)), (spec(64),)
    for op, operands in (frozen, view):
        roofline = op_time(op, operands, CPU)
        assert measured.find(op, operands, roofline) == (roofline, "roofline")


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([torch.float32, X]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(st.lists(LITERALS, max_size=4))
def test_a_call_survives_being_written(args: list[Argument]) -> None:
    op = Op(name="y", target="lib.op", args=tuple(args), kwargs=(("k", torch.bfloat16),), outputs=(spec(2),))
    operands = tuple(spec(i, 3) for i, _ in enumerate(op.operands))
    again, specs = decode(encode(op, operands))
    assert specs == operands
    assert repr(key_of(again, specs)) == repr(key_of(op, operands))


def test_names_and_scales_do_not_count_shapes_and_flags_do() -> None:
    def key(name: str, p: float, train: bool) -> object:
        op = Op(name=name, target="aten.dropout.default", args=(X, p, train), outputs=(spec(4),))
        return key_of(op, (spec(4),))

    assert key("a", 0.1, True) == key("b", 0.2, True)
    assert len({key("a", 0.1, True), key("a", 0.0, True), key("a", 0.1, False)}) == 3


def test_a_profile_with_operators_survives_a_round_trip(tmp_path: Path) -> None:
    data = as_table(load_profile("cpu"))
    entries = [asdict(time) | {"spread": 0.1, "repeats": 15} for time in TIMES]
    (tmp_path / "times.json").write_text(json.dumps({"device": "d", "times": entries, "failed": []}), encoding="utf-8")
    data["device"]["operators"] = {"file": "times.json", "provenance": "example"}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(data), encoding="utf-8")
    cluster = Cluster.parse(f"{tmp_path}/mine.toml:1x2")
    assert cluster.devices[0].operators == TABLE
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    # four ranks on two cores take twice as long
    crowded = CostModel(Cluster.parse(f"{tmp_path}/mine.toml:1x4?cores=2"), FP32, "adamw")
    alone = CostModel(cluster, FP32, "adamw")
    assert alone.op_time_s(*linear(64)) == OpTime(1e-3, 3e-3)
    assert crowded.op_time_s(*linear(64)) == OpTime(2e-3, 6e-3)
    (tmp_path / "times.json").write_text("{}", encoding="utf-8")
    refuses(UsageError, r"times\.json.*'times'", Cluster.parse, f"{tmp_path}/mine.toml:1x2")


def test_a_table_of_nonsense_is_refused_and_the_note_counts() -> None:
    bad = replace(TABLE, times=(OperatorTime(call="[1]", forward_s=1.0, backward_s=0.0),))
    refuses(UsageError, "names no call", Measured, bad, CPU)
    text = measurement_note(Counter({"measured": 5, "scaled": 2}))
    assert text.endswith("5 of 7 operators at their measured time, 2 scaled from the nearest measured size")
