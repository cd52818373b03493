from dataclasses import replace

import pytest

from autopar.models.transformer import Sizes
from tools.benchmarks import baselines, samplers
from tools.benchmarks.baselines import Problem, Row, autopar, worse

SIZES = Sizes(
    family="gpt", hidden=1024, ffn=4096, heads=16, kv_heads=16, vocabulary=1024, sequence=256, attention="flash",
    dtype="bfloat16",
)  # fmt: skip
SMALL = Problem(cluster="h100-sxm5-80gb:1x4", global_batch_size=8, layers=4, sizes=SIZES)


@pytest.mark.slow
def test_nothing_beats_the_search_and_all_are_priced_alike() -> None:
    graph = SMALL.graph("small")
    ours = autopar(SMALL, graph)
    experts = [baselines.expert(SMALL, graph, method, tries) for method, tries in baselines.rules(SMALL)]
    everything = baselines.random_search(SMALL, graph, 10**6)
    sampled = baselines.plain_tpe(SMALL, graph, 20)
    assert ours.step_time_s and everything.step_time_s == ours.step_time_s  # all candidates, none left out by a bound
    assert sampled.step_time_s and sampled.step_time_s >= ours.step_time_s
    assert 0 < ours.evaluations < everything.evaluations
    assert any(row.step_time_s for row in experts)
    assert worse({"small": [ours, *experts, everything, sampled]}) == []


def test_a_search_that_loses_is_told() -> None:
    ours = Row(method="autopar", step_time_s=1.0, evaluations=3, cpu_s=0.5, plan="tp=1")
    rows = {"Llama 7B, 8 H100": [ours, replace(ours, method="rule", step_time_s=0.9), replace(ours, step_time_s=None)]}
    assert len(worse(rows)) == 1
    assert "| rule | 0.9 s | 0.900 | 3 | 0.5 | tp=1 |" in baselines.page(rows)
    assert "does not fit" in baselines.page(rows)
    assert len(baselines.PROBLEMS) == 6


@pytest.mark.slow
def test_bounds_and_samplers_are_told_side_by_side() -> None:
    graph = SMALL.graph("small")
    rows = [samplers.run(SMALL, graph, "default", method, 10) for method in ("bounds alone", "TPE alone", "both, TPE")]
    best_s = autopar(SMALL, graph).step_time_s
    for row in rows:
        assert row.lower_bound_s <= best_s <= row.step_time_s * (1 + 1e-9) and 0 < row.asked <= 10
    name = next(iter(samplers.CASES))
    assert "| 10 | TPE alone |" in samplers.page({name: rows})
    assert rows[2].step_time_s is not None
    faster = replace(rows[0], step_time_s=rows[2].step_time_s * 0.9)
    assert len(samplers.worse({name: [faster, *rows[1:]]})) == 1
    assert samplers.worse({name: [rows[2], replace(rows[2], method="bounds alone")]}) == []
