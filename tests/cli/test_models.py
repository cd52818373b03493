import json
import re
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

from autopar.graph.graph import Graph
from autopar.measure import operators as ops
from autopar.models.resolve import resolve_model
from autopar.plan.file import load_plan
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.verification.compared_models import VerifiedModel
from autopar.verification.results import RankErrors, VerifyReport
from tests.support.cli_runner import Run
from tests.support.distributed.plans import make_plan

GPT = "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=16"
ONE_LAYER = GPT.replace("layers=2", "layers=1")


def test_trace_counts_parameters_flops_and_blocks(run: Run) -> None:
    found = run("trace", GPT, "--json").json
    hidden, vocabulary, sequence = 32, 64, 16
    block = 12 * hidden**2 + 13 * hidden
    assert found["parameters"] == 2 * block + (vocabulary + sequence + 2) * hidden
    assert found["tied"] == {"transformer.wte.weight": ["lm_head.weight"]}
    assert {block["count"]: block["parameters"] for block in found["blocks"]}[2] == block
    products = 2 * 12 * hidden**2 * sequence + hidden * vocabulary * sequence
    assert found["flops_per_sample"] > 6 * products  # and attention's scores
    assert found["flops_per_sample"] < 6 * products * 1.2 and found["operators_without_rule"] == []
    assert found["operators"]["autopar.cross_entropy_sum"] == 1


def test_trace_prints_a_summary_and_names_operators_without_a_rule(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run("trace", GPT, "--seq", "8").text
    for said in ("transformer.h.0-1", "input       input_ids (2, 8) int64", "Every operator has a rule."):
        assert said in text
    monkeypatch.setattr("autopar.report.summaries.has_rule", lambda target: target != "aten.layer_norm.default")
    done = run("trace", ONE_LAYER)
    assert "\n  aten.layer_norm.default" in done.out.split("Operators without a rule")[1]


@cache
def _graph_of(model: str) -> Graph:
    return resolve_model(model).trace()


def _plan_of(model: str, mesh: Mesh) -> Plan:
    plan = make_plan(_graph_of(model), mesh, global_batch_size=32, micro_batch_size=2)
    return replace(plan, model=replace(plan.model, tokens_per_sample=16))


@pytest.mark.distributed
def test_verify_compares_every_rank_of_a_plan_file(run: Run, tmp_path: Path) -> None:
    _plan_of(GPT, Mesh(tp=2)).save(path := tmp_path / "plan.json")
    found = run("verify", path, "--steps", "2", "--json").json
    assert (found["passed"], found["mesh"]) == (True, "tp=2")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert all(rank["gradient"] < 1e-4 for rank in found["ranks"])


def test_verify_fails_when_a_rank_differs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plan_of(ONE_LAYER, Mesh(tp=2)).save(path := tmp_path / "plan.json")
    rows = tuple(
        RankErrors(
            rank=rank, losses=(1.0,), loss=1e-7, gradient=gradient, gradient_name="lm_head.weight", parameter=0.0,
            parameter_name="wte",
        )
        for rank, gradient in enumerate((1e-7, float("inf")))
    )  # fmt: skip
    report = VerifyReport(steps=1, reference_losses=(1.0,), rows=rows)
    monkeypatch.setattr("autopar.verification.against_one_device.verify", lambda *_args, **_options: report)
    done = run("verify", path)
    assert done.code == 1
    assert [line.endswith("past") for line in done.out.splitlines()[4:6]] == [False, True]
    assert "error: rank 1: gradients of the first step differ" in done.err and "Traceback" not in done.err
    assert [rank["gradient"] for rank in json.loads(run("verify", path, "--json").out)["ranks"]] == [1e-7, "inf"]


def test_plan_for_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    _plan_of(ONE_LAYER, Mesh(tp=2)).save(path := tmp_path / "plan.json")
    done = run("verify", path, "--model", ONE_LAYER.replace("hidden=32", "hidden=64"))
    assert done.code == 1 and "This plan was made for model" in done.error
    assert f"made for model '{ONE_LAYER}'" in done.error


def test_search_prints_saves_and_answers_in_json(run: Run, tmp_path: Path) -> None:
    found = run("search", GPT, "--cluster", "cpu:1x2", "--global-batch", "8", "-o", "plan.json", "--json").json
    assert prod(found["mesh"][axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")) == 2
    assert found["search"]["lower_bound_s"] <= found["predicted"]["step_time_s"]
    assert sum(found["predicted"]["breakdown"].values()) == pytest.approx(found["predicted"]["step_time_s"])
    saved = load_plan(tmp_path / "plan.json")
    assert saved.predicted.step_time_s == found["predicted"]["step_time_s"] and saved.predicted.stage_times
    assert run("show", "plan.json").out == f"{saved}\n"


def test_explain_compares_with_other_pins(run: Run) -> None:
    run("search", GPT, "--cluster", "cpu:1x2", "--global-batch", "8", "--pin", "tp=1", "-o", "plan.json")
    assert "slower" in run("explain", "plan.json").out
    found = run("explain", "plan.json", "--why-not", "tp=2", "--json").json
    assert {"path": "mesh.tp", "before": 1, "after": 2} in found["changes"]
    assert found["step_time_ratio"] > 0


@pytest.mark.distributed
def test_verify_of_a_model_with_dropout_and_padding(run: Run) -> None:
    done = run("verify", "hf:gpt2?n_layer=2&n_embd=32&n_head=4&vocab_size=64", "--cluster", "cpu:1x2", "--pin", "tp=2")
    assert "every rank agrees" in done.text
    splits = re.search(r"tp=2 splits (\d+) of (\d+) parameters", done.text)
    assert int(splits[1]) > int(splits[2]) / 2


def test_a_model_is_verified_without_the_dropout_that_plans_are_made_for() -> None:
    pytest.importorskip("transformers")
    sizes = "num_hidden_layers=1&hidden_size=8&num_attention_heads=2&intermediate_size=16&vocab_size=16"
    subject = VerifiedModel(resolve_model(f"hf:bert?{sizes}", sequence_length=4), masked=True)
    trained, verified = (subject.trace(as_trained=as_trained) for as_trained in (True, False))
    assert any(op.target == "autopar.dropout" for op in trained.ops)
    assert not any(op.target == "autopar.dropout" for op in verified.ops)
    assert any(getattr(module, "p", 0.0) for module in subject.source.model.modules()), "the model stays as it is"


MODEL = ("gpt:layers=1,hidden=16,heads=2,vocab=32", "--seq", "8")


@pytest.mark.slow
def test_operators_are_timed_once_and_plans_use_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "REPEATS", 3)
    monkeypatch.setattr(ops, "MIN_BATCH_S", 1e-4)
    given = ("profile", "ops", *MODEL, "--cluster", "cpu:1x1", "--space", "quick", "--pin", "micro_batch=1")
    first = run(*given, "-o", "mine.toml", "--json").json
    assert first["operators"] == first["timed_now"] > 10 and first["operators_failed"] == 0
    again = run(*given, "-o", "mine.toml", "--json").json
    assert (again["operators"], again["timed_now"]) == (first["operators"], 0)
    plan = ("estimate", *MODEL, "--cluster", "mine.toml:1x1", "--global-batch", "4", "--pin", "micro_batch=1")
    shown = run(*plan).out
    assert "operators at their measured time" in shown and "by roofline" not in shown


def test_what_cannot_be_profiled_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("profile", "ops", *MODEL, "--cluster")
    assert "does not end in .toml" in run(*given, "cpu:1x1", "-o", "mine.json").mistake
    (tmp_path / "file").write_text("")
    for command in (("ops", *MODEL, "--cluster", "cpu:1x1"), ("links",), ("all", *MODEL)):
        assert "Cannot write file/mine.toml" in run("profile", *command, "-o", "file/mine.toml").mistake
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in run(*given, "h100-sxm5-80gb:1x8", "-o", "mine.toml").mistake
