import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import UsageError
from autopar.hardware.read import load_profile
from autopar.measure import operators as ops
from autopar.measure.profiles import device_of
from tests.support.said import refuses

CPU = torch.device("cpu")


def tensor(*shape: int, dtype: str = "float32", grad: bool = True) -> dict[str, Any]:
    return {"tensor": [dtype, list(shape), grad]}


def call(target: str, args: list[Any], out: dict[str, Any]) -> str:
    return json.dumps([target, args, {}, [out]], separators=(",", ":"))


LINEAR = call("aten.linear.default", [tensor(8, 16), tensor(4, 16), tensor(4)], tensor(8, 4))
GELU = call("aten.gelu.default", [tensor(8, 16)], tensor(8, 16))
IDS = tensor(2, 8, dtype="int64", grad=False)
MISSING = call("aten.no_such_operator.default", [tensor(2)], tensor(2))
HUGE = call("aten.gelu.default", [tensor(2**40)], tensor(2**40))


@pytest.mark.parametrize(("one", "backward"), [
    (LINEAR, True),
    (call("aten.relu.default", [tensor(64, grad=False)], tensor(64, grad=False)), False),
    (call("aten.embedding.default", [tensor(32, 4), IDS], tensor(2, 8, 4)), True),
    (call("autopar.cross_entropy_sum", [tensor(2, 8, 5), IDS, -100, 0.0], tensor()), True),
    (call("autopar.cross_entropy_vocabulary", [tensor(2, 8, 5), IDS, "tp", -100, 0.0, 10], tensor()), True),
    (call("autopar.dropout", [tensor(64), 0.1], tensor(64)), True),
])  # fmt: skip
def test_an_operator_is_timed_forward_and_backward(one: str, backward: bool) -> None:
    with ops.one_rank(CPU):
        found = ops.time_call(one, CPU)
    assert found["call"] == one
    assert found["forward_s"] > 0
    assert (found["backward_s"] > 0) == backward
    assert found["repeats"] >= ops.LEAST_REPEATS


def test_a_failure_is_kept_with_its_reason_and_the_rest_goes_on(tmp_path: Path) -> None:
    file = ops.OperatorFile(tmp_path / "times.json", "here")
    file.measure([MISSING, HUGE, GELU], CPU)
    assert list(file.times) == [GELU]
    assert "no_such_operator" in file.failed[MISSING]
    assert file.failed[HUGE].startswith("MemoryError: needs about")
    again = ops.OperatorFile(tmp_path / "times.json", "here")
    assert (again.times, again.failed) == (file.times, file.failed)


def test_a_second_run_continues_where_the_first_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def count(one: str, device: torch.device, *, engine_s: float) -> dict[str, Any]:
        timed.append(one)
        if one == MISSING and len(timed) == 2:
            raise KeyboardInterrupt
        return {"call": one, "forward_s": 1.0, "backward_s": 2.0, "spread": 0.0, "repeats": 3}

    monkeypatch.setattr(ops, "time_call", count)
    path = tmp_path / "times.json"
    with pytest.raises(KeyboardInterrupt):
        ops.OperatorFile(path, "here").measure([LINEAR, MISSING, GELU], CPU)
    assert timed == [LINEAR, MISSING]
    second = ops.OperatorFile(path, "here")
    second.measure([LINEAR, MISSING, GELU], CPU)
    assert timed == [LINEAR, MISSING, MISSING, GELU]
    assert list(second.times) == [LINEAR, MISSING, GELU]
    refuses(UsageError, "device of this file of operator times does not match", ops.OperatorFile, path, "elsewhere")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", ""),
        ('{"device": "here", "times": 3}', ".*'times'.*a list"),
        ('{"device": "here", "times": [{}]}', r".*'times\[0\]\.call'"),
        ('{"device": "here", "failed": [{"call": "[]"}]}', r".*'failed\[0\]\.reason'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text, encoding="utf-8")
    refuses(UsageError, str(path) + says, ops.OperatorFile, path, "here")


def test_operators_of_a_cpu_are_timed_in_one_thread() -> None:
    """Times are those of the calling thread, which does a part of the work where torch has several."""
    torch.set_num_threads(2)
    assert device_of(load_profile("cpu")) == CPU
    assert torch.get_num_threads() == 1
