import json
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.support.said import refuses
from tools.benchmarks import problems
from tools.benchmarks.problem_set import load_problems
from tools.benchmarks.problem_tables import comparison, judged

TINY = """
[problems.tiny]
kinds = ["decoder"]
model = "gpt:layers=2,hidden=32,heads=2,vocab=65"
cluster = "cpu:1x2"
batch = 4
sequence = 8
precision = "fp32"
exhaustive = true
"""


def test_problems_are_many_and_of_every_kind() -> None:
    known = load_problems()
    assert len(known) >= 30 and sum(problem.is_exhaustive for problem in known.values()) >= 15
    kinds = {kind for problem in known.values() for kind in problem.kinds}
    assert kinds >= {
        "decoder", "encoder", "encoder-decoder", "experts", "vision", "alternating", "long", "memory", "wide", "network", "mixed",
        "shares", "pins", "cpu", "odd", "study", "false certificate",
    }  # fmt: skip
    odd = [problem for problem in known.values() if "odd" in problem.kinds and problem.is_exhaustive]
    assert len(odd) >= 5


def test_a_misspelt_key_of_a_problem_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "problems.toml").write_text(TINY.replace("batch", "bach"))
    refuses(ValueError, "tiny has the key 'bach'", load_problems, path)


def result(**changes: Any) -> dict[str, Any]:
    return {
        "asked": {"model": "m"}, "time_s": 1.0, "gap": 0.01, "cpu_s": 2.0, "peak_bytes": 2**30, "hit_limit": False,
        "is_steady": True, "plan": {"mesh": "tp=2"}, "evaluated": 1, "candidates": 9, **changes,
    }  # fmt: skip


def faults_of(*after: dict[str, Any], judges_cpu: bool = True) -> list[str]:
    names = [f"p{i}" for i in range(len(after))]
    old = dict.fromkeys(names, result())
    return comparison(names, old, dict(zip(names, after, strict=True)), judges_cpu=judges_cpu)[1]


@pytest.mark.parametrize(
    ("kept", "broken", "says"),
    [
        ({"time_s": 1.004}, {"time_s": 1.006}, "slower"),
        ({"gap": 0.014}, {"gap": 0.016}, "wider"),
        ({"cpu_s": 2.4}, {"cpu_s": 3.1}, "1.55 times"),
        ({"time_s": 1.1, "choices_before_s": 1.1}, {"time_s": 0.9, "choices_before_s": 0.8}, "slower"),
        ({}, {"failed": "out of\nmemory"}, "no plan any more: memory"),
        ({}, {"asked": {"model": "n"}}, "different questions"),
    ],
)
def test_each_part_of_the_rule(kept: dict[str, Any], broken: dict[str, Any], says: str) -> None:
    assert faults_of(result(**kept)) == []
    own = faults_of(result(), result(**broken))
    assert [fault.startswith("p1: ") and says in fault for fault in own] == [True]


def test_cpu_seconds_count_by_their_mean_too_and_only_side_by_side() -> None:
    slow = [result(cpu_s=2.0 * 1.3)] * 2
    assert [says for says in faults_of(*slow) if "geometric mean" in says] == faults_of(*slow) != []
    assert faults_of(*slow, judges_cpu=False) == []
    assert faults_of(result(cpu_s=1.6), result(cpu_s=2.6)) == []


def test_a_plan_where_there_was_none_is_no_fault() -> None:
    table, faults = comparison(
        ["a", "b"], {"a": {"asked": {"model": "m"}, "failed": "late"}, "b": result()}, {"a": result(), "b": result()},
        judges_cpu=True,
    )  # fmt: skip
    assert faults == []
    assert "before: late" in table


def test_candidates_that_beat_a_plan_or_its_bound_are_counted() -> None:
    plan = {"time_s": 1.0, "bound_s": 0.9}
    pool = [{"candidate": name, "time_s": time_s} for name, time_s in (("a", 1.0), ("b", 0.95), ("c", 0.8), ("d", 2.0))]
    found = judged(plan, [*pool, {"candidate": "e", "reason": "memory"}])
    keys = ("candidates", "fitting", "faster", "below", "best", "best_s")
    assert [found[key] for key in keys] == [5, 4, 2, 1, "c", 0.8]


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All commands of a test ask the same worker."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    with problems.tree_of(None) as tree, problems.Worker(tree) as worker:
        monkeypatch.setattr(problems, "Worker", lambda _: nullcontext(worker))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_tiny_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out, pools = tmp_path / "problems.toml", tmp_path / "results.json", tmp_path / "pools.json"
    file.write_text(TINY)
    given = ["--problems", str(file)]
    assert problems.main(["run", *given, "--rounds", "2", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    own = kept["problems"]["tiny"]
    assert own["is_steady"] and 0 < own["bound_s"] <= own["time_s"]
    assert own["cpu_s"] > 0 and own["peak_bytes"] > own["before_bytes"] // 2
    assert (own["rounds"], own["hit_limit"], own["asked"]["batch"]) == (2, False, 4)
    assert problems.main(["compare", *given, str(out), "--record", str(out)]) == 0
    quicker = deepcopy(kept)
    quicker["problems"]["tiny"]["time_s"] *= 0.99
    record = tmp_path / "record.json"
    record.write_text(json.dumps(quicker))
    assert problems.main(["compare", *given, str(out), "--record", str(record)]) == 1
    assert "tiny: the plan is 1.01 % slower" in capsys.readouterr().out
    assert problems.main(["exhaustive", *given, "--out", str(pools)]) == 0
    found = json.loads(pools.read_text())["problems"]["tiny"]
    assert found["candidates"] == own["candidates"] >= found["fitting"] > 1
    assert found["best_s"] == pytest.approx(own["time_s"], rel=1e-9)
    lines = next((tmp_path / "evaluations").glob("tiny-*.jsonl")).read_text()
    assert problems.main(["exhaustive", *given, "--out", str(pools)]) == 0
    assert next((tmp_path / "evaluations").glob("tiny-*.jsonl")).read_text() == lines, "what is kept is not asked again"
    page = tmp_path / "page.md"
    files = ["--record", str(out), "--results", str(out), "--pools", str(pools), "--page", str(page)]
    assert problems.main(["page", *given, *files]) == 0
    assert page.read_text().count("| tiny |") == 3
