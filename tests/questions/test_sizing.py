import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import api
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import scaled
from autopar.plan.plan import Plan
from autopar.planner.search import Evaluation, peak_bytes
from autopar.questions.comparisons import MEMORY_STEP, Point, front, parse_objectives, parse_sweep, sweep, undominated
from autopar.questions.sizing import Ask, cheapest_cluster, largest_batch, longest_sequence, sizes_of, smallest_cluster
from autopar.util.files import data_files
from tests.support.cli_runner import Run
from tests.support.example_plans import llama_plan
from tests.support.planner.graphs import llama_block, mlp
from tests.support.said import refuses

KIND = "h100-sxm5-80gb:3x4"
MLP = mlp(layers=6, batch=2, width=4096, hidden=16384)


def graph_at(samples: int, tokens: int | None) -> Graph:
    return MLP if tokens is None else llama_block(layers=2, batch=2, seq=tokens, hidden=256, heads=4, ffn=512)


ASK = Ask(graph_at=graph_at, cluster=KIND, global_batch_size=96, space="quick")


def alone(ask: Ask, cluster: Cluster | str) -> Plan | None:
    """The fastest plan by the ordinary search, without a limit on its time."""
    graph = ask.graph_at(ask.global_batch_size, ask.sequence)
    try:
        return api.search(
            graph, cluster=cluster, global_batch_size=ask.global_batch_size, pins=ask.pins, space=ask.space,
            precision=ask.precision,
        )  # fmt: skip
    except InfeasibleError:
        return None


@pytest.fixture(scope="module")
def times() -> dict[str, float]:
    return {size: plan.predicted.step_time_s for size in sizes_of(KIND) if (plan := alone(ASK, size))}


def test_the_smallest_cluster_is_that_of_all_sizes(times: dict[str, float]) -> None:
    assert len(times) == 5
    for most_s in (*times.values(), 1.3 * min(times.values()), 10 * max(times.values())):
        first = next(size for size in times if times[size] <= most_s)
        found = smallest_cluster(replace(ASK, max_step_time_s=most_s))
        assert found.value == first and found.plan.predicted.step_time_s == times[first]
        assert found.plan.cluster == first
    refuses(InfeasibleError, "within", smallest_cluster, replace(ASK, max_step_time_s=0.9 * min(times.values())))


def test_the_cheapest_cluster_is_that_of_all_sizes_of_all_kinds(times: dict[str, float]) -> None:
    other = "a100-sxm4-80gb:2x4"
    more = {size: plan.predicted.step_time_s for size in sizes_of(other) if (plan := alone(ASK, size))}
    for price, most_s in ((1.0, 1.1 * sorted(times.values())[1]), (0.1, 1.1 * min(more.values())), (0.6, None)):
        prices = {"h100-sxm5-80gb": 2.0, "a100-sxm4-80gb": price}
        in_time = {size: time_s for size, time_s in (times | more).items() if most_s is None or time_s <= most_s}
        ranks = {size: Cluster.parse(size).world_size for size in in_time}
        costs = {size: prices[size.split(":")[0]] * ranks[size] / 3600 * in_time[size] for size in in_time}
        found = cheapest_cluster(replace(ASK, max_step_time_s=most_s), prices, [other])
        assert found.cost == pytest.approx(min(costs.values()))
        assert found.value == min(costs, key=lambda size: costs[size])
        for trial in found.trials:
            dear = trial.value in costs and costs[trial.value] > min(costs.values())
            missing = ("", "none cheaper") if dear else ("", "none fits", f"none within {most_s or 0:g} s")
            assert trial.missing in missing and (trial.plan is None) is bool(trial.missing)
    refuses(InfeasibleError, "within 0 s", cheapest_cluster, replace(ASK, max_step_time_s=0.0), {"h100-sxm5-80gb": 2.0})
    refuses(UsageError, "price", cheapest_cluster, ASK, {"a100-sxm4-80gb": 1.0})


def test_a_sweep_has_the_best_plan_of_each_cluster() -> None:
    swept = sweep(ASK, "link.bandwidth", (0.1, 1.0, 4.0))
    for factor, best in swept:
        assert best.predicted == alone(ASK, scaled(Cluster.parse(KIND), {"link.bandwidth": factor})).predicted
    seconds = [best.predicted.step_time_s for _, best in swept]
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.slow
def test_the_longest_sequence_is_that_of_all() -> None:
    options = {"cluster": "cpu:1x2?memory=530MB", "global_batch_size": 4, "space": "quick", "precision": "bf16"}
    ask = Ask(graph_at=graph_at, **options)
    step = 1024
    fitting = [n for n in range(step, 16 * step, step) if alone(replace(ask, sequence=n), ask.cluster)]
    found = longest_sequence(ask, step=step)
    assert 0 < len(fitting) < 15  # the limit lies inside
    assert fitting == [step * (i + 1) for i in range(len(fitting))]  # what bisection takes for granted
    assert found.value == f"{fitting[-1]:,} tokens" and found.plan.model.tokens_per_sample == fitting[-1]
    assert found.plan.predicted == alone(replace(ask, sequence=fitting[-1]), ask.cluster).predicted


def test_the_largest_batch_is_that_of_all() -> None:
    small = mlp(layers=2, batch=2, width=512, hidden=2048)
    options = {"cluster": "cpu:1x2?memory=530MB", "global_batch_size": 10**6, "space": "quick"}
    ask = Ask(graph_at=lambda _samples, _tokens: small, **options)
    pinned = replace(ask, pins=("num_micro_batches=1",))

    def fits(samples: int) -> bool:
        return alone(replace(pinned, global_batch_size=samples), ask.cluster) is not None

    found = largest_batch(ask)
    value = int(found.value.split()[0].replace(",", ""))
    assert (found.plan.global_batch_size, found.plan.num_micro_batches) == (value, 1)
    assert fits(value) and not fits(value + 2)
    assert not found.limit and all("fits" in trial.missing for trial in found.trials if trial.plan is None)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 10, 12])
def test_no_larger_batch_is_tried_than_was_asked_about(most: int) -> None:
    """So that none is said not to fit that was never looked at."""
    small = mlp(layers=2, batch=2, width=8, hidden=16)
    ask = Ask(graph_at=lambda _samples, _tokens: small, cluster="cpu:1x4", global_batch_size=most, space="quick")
    found = largest_batch(ask)
    assert found.plan.global_batch_size == max(n for n in (1, 2, 4, 8, 12) if n <= most)
    assert [trial.plan is found.plan for trial in found.trials] == [True]
    assert found.limit == f"no larger ones than the global batch of {most} are tried"


@pytest.mark.slow
def test_a_length_past_the_positions_of_a_model_is_not_said_to_be_too_large(run: Run) -> None:
    model = "hf:gpt2?n_layer=1&n_embd=32&n_head=2&n_positions=128&vocab_size=64"
    asked = ("longest-sequence", model, "--cluster", "cpu:1x2", "--global-batch", "2", "--space", "quick")
    text = run(*asked, "--step", "64").text
    assert text.startswith("128 tokens\n") and "none fits" not in text
    assert re.search(r"192 tokens +- +- +the model takes no such length", text)


def test_nothing_fits_is_said() -> None:
    ask = replace(ASK, cluster="cpu:1x2?memory=402MB", global_batch_size=4)
    half = replace(ask, precision="bf16")
    refuses(InfeasibleError, "", longest_sequence, half, step=64)
    refuses(InfeasibleError, "", largest_batch, ask)
    refuses(InfeasibleError, "", smallest_cluster, ask)
    refuses(InfeasibleError, "No plan fits", front, ask, ("time", "memory"))


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        *((parse_sweep, text, "NAME=FACTOR") for text in ("link.bandwidth", "link.bandwidth=", "link.bandwidth=a,2")),
        *((parse_objectives, text, "two different") for text in ("time", "time,time")),
        (parse_objectives, "time,memroy", "memory"),
    ],
)
def test_a_malformed_sweep_and_malformed_objectives_are_refused(parse: Any, text: str, said: str) -> None:
    refuses(UsageError, said, parse, text)


MODEL = ("gpt:layers=2,hidden=64,heads=4,vocab=128", "--cluster", "cpu:1x2", "--global-batch", "8")


@pytest.mark.parametrize(
    ("verb", "options", "value"),
    [
        ("smallest-cluster", ("--max-step-time", "10"), "cpu:1x1"),
        ("cheapest-cluster", ("--price", "cpu=1"), "cpu:1x1"),
        ("largest-batch", (), "8 samples"),
    ],
)
def test_questions_in_the_shell(run: Run, verb: str, options: tuple[str, ...], value: str) -> None:
    found = run(verb, *MODEL, "--seq", "32", "--space", "quick", *options, "--json").json
    assert found["answer"] == value and found["plan"]["predicted"]["step_time_s"] > 0
    assert found["tried"]


@pytest.mark.slow
def test_the_longest_sequence_in_the_shell(run: Run) -> None:
    tight = [*MODEL[:2], "cpu:1x2?memory=425MB", *MODEL[3:], "--space", "quick"]
    found = run("longest-sequence", *tight, "--step", "512", "--json", "-o", "plan.json").json
    tokens = found["plan"]["model"]["tokens_per_sample"]
    assert found["answer"] == f"{tokens:,} tokens"
    assert (tokens % 512, found["tried"][-1]["step_time_s"]) == (0, None)
    assert run("show", "plan.json", "--json").json["model"]["tokens_per_sample"] == tokens


def test_a_sweep_in_the_shell(run: Run) -> None:
    asked = ("sweep", *MODEL, "--seq", "32", "--space", "quick", "--scale", "link.bandwidth=0.5,1")
    found = run(*asked, "--json").json
    assert [p["factor"] for p in found["plans"]] == [0.5, 1.0] and found["plans"][1]["step_time_ratio"] == 1
    lines = run(*asked).out.splitlines()
    assert lines[1].startswith("link.bandwidth  ") and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("cheapest-cluster", (), "Missing price of cpu"),
        ("cheapest-cluster", ("--price", "cp=1"), "Unknown device with a price 'cp'. Did you mean 'cpu'?"),
        ("cheapest-cluster", ("--price", "cpu=1,cpu=2"), "The device in 'cpu=2' has two prices"),
        ("cheapest-cluster", ("--price", "cpu"), "'cpu' is not of the form DEVICE=NUMBER"),
        ("search", ("--max-step-time", "1e-9"), "1 ns a step"),
        ("pareto", ("--objectives", "time,price", "--price", "cpu=1,h100=2"), "Unknown device with a price 'h100'. Known: cpu"),
        ("pareto", ("--price", "cpu=1"), "--price does not go with --objectives time,memory"),
    ],
)  # fmt: skip
def test_questions_that_make_no_sense(run: Run, verb: str, options: tuple[str, ...], message: str) -> None:
    done = run(verb, *MODEL, "--seq", "32", *options)
    assert done.code in (2, 3)
    assert message in done.error


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        ("longest-sequence", "--seq=32"), ("largest-batch", "--workers=2"), ("sweep", "--output=plan.json"),
        ("smallest-cluster", "--price=cpu=1"), ("search", "--minimize=devices"),
    ],
)  # fmt: skip
def test_a_verb_has_no_option_that_it_would_not_heed(run: Run, verb: str, option: str) -> None:
    done = run(verb, *MODEL, option)
    assert done.code == 2
    assert f"No such option: {option.partition('=')[0]}" in done.err


def test_a_factory_decides_the_length_of_its_sequences(run: Run) -> None:
    assert "a factory, which decides the length" in run("longest-sequence", "my.models:net", *MODEL[1:]).mistake


# --- fronts


SMALL = st.integers(1, 4)


@given(st.lists(st.tuples(SMALL, SMALL, SMALL), min_size=1, max_size=12))
def test_what_is_left_is_what_nothing_beats(values: list[tuple[int, int, int]]) -> None:
    plan = llama_plan()
    plans = [replace(plan, predicted=replace(plan.predicted, step_time_s=float(time_s))) for time_s, _, _ in values]
    rest = [{"head_room": -float(memory), "num_devices": devices} for _, memory, devices in values]
    points = [Point(cluster="c", plan=own, **more) for own, more in zip(plans, rest, strict=True)]
    objectives = ("time", "memory", "devices")
    kept = [p.values(objectives) for p in undominated(points, objectives)]
    every = {p.values(objectives) for p in points}
    best = {v for v in every if not any(o != v and all(a <= b for a, b in zip(o, v, strict=True)) for o in every)}
    assert len(kept) == len(set(kept)) and set(kept) == best


def test_time_against_devices_is_that_of_every_size(times: dict[str, float]) -> None:
    found = front(ASK, ("time", "devices"))
    expected = [
        size for size, time_s in times.items()
        if not any(times[other] <= time_s for other in list(times)[: list(times).index(size)])
    ]  # fmt: skip
    assert sorted(p.cluster for p in found) == sorted(expected)
    assert [p.plan.predicted.step_time_s for p in found] == sorted(times[size] for size in expected)


def test_less_memory_costs_time_and_every_point_is_the_fastest_under_its_limit() -> None:
    ask = replace(ASK, cluster="h100-sxm5-80gb:1x2", global_batch_size=2**17, pins=("pp=1",))
    found, cluster = front(ask, ("time", "memory")), Cluster.parse(ask.cluster)
    assert len(found) > 1 and found[0].plan.predicted == alone(ask, cluster).predicted
    for before, after in pairwise(found):
        assert after.plan.predicted.step_time_s > before.plan.predicted.step_time_s
        assert 1 - after.head_room <= MEMORY_STEP * (1 - before.head_room)
        own = scaled(cluster, {"device.memory": (1 - after.head_room) * (1 + 1e-9)})
        assert alone(ask, own).predicted.step_time_s == after.plan.predicted.step_time_s
    least = scaled(cluster, {"device.memory": MEMORY_STEP * (1 - found[-1].head_room)})
    assert alone(ask, least) is None


def test_a_sampled_front_is_that_of_all_candidates_once_all_are_asked(tmp_path: Path) -> None:
    path, shipped = tmp_path / "own.toml", data_files("search")["quick"].read_text()
    own = shipped.replace("exhaustive = 5000", "exhaustive = 1").replace("trials = 60", "trials = 10000")
    path.write_text(own.replace('sampler = "tpe"', 'sampler = "nsga2"'))
    ask = replace(ASK, cluster="h100-sxm5-80gb:1x2", global_batch_size=2**17, space=str(path))
    found = front(ask, ("time", "memory"))
    planner = ask.planner(Cluster.parse(ask.cluster))
    every = [e.prediction for c in planner.pool if isinstance(e := planner.evaluator.evaluate(c), Evaluation)]
    values = {(p.step_time_s, peak_bytes(p)) for p in every}
    best = {v for v in values if not any(o != v and o[0] <= v[0] and o[1] <= v[1] for o in values)}
    assert len(best) > 1
    assert {(p.plan.predicted.step_time_s, peak_bytes(p.plan.predicted)) for p in found} == best


def test_a_price_joins_time_and_devices() -> None:
    found = front(ASK, ("time", "price"), {"h100-sxm5-80gb": 3.6e3})
    for one in found:
        assert one.cost == pytest.approx(one.num_devices * one.plan.predicted.step_time_s)
    costs = [one.cost for one in found]
    assert costs == sorted(costs, reverse=True)  # what is slower is cheaper
    refuses(UsageError, "--price: Missing price", front, ASK, ("time", "price"))


@pytest.mark.slow
def test_the_command_prints_a_row_for_each(run: Run) -> None:
    model = "gpt:layers=2,hidden=64,heads=4,vocab=96,seq=32"
    arguments = ["pareto", model, "--cluster", "cpu:1x4", "--global-batch", "8", "--space", "quick"]
    data = run(*arguments, "--objectives", "time,devices", "--json").json
    assert data["front"][0]["plan"]
    counts = [row["num_devices"] for row in data["front"]]
    assert counts == sorted(counts, reverse=True)
    text = run(*arguments, "--objectives", "time,devices").out
    assert max(map(len, text.splitlines())) <= 80
    assert run(*arguments, "--objectives", "time").code == 2
