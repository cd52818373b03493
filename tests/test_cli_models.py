"""The shell command on models: tracing, planning, verifying, and what is said about models that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_runner import Run, run_fixture

run = run_fixture

GPT = "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=16"

USER_MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y):
        return (self.down(torch.relu(self.up(x))) - y).square().mean()


class Branching(Net):
    def forward(self, x, y):
        loss = super().forward(x, y)
        if loss > 1:
            loss = loss * 2
        return loss


def batch():
    return {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}


def net():
    return Net(), batch()


def branching():
    return Branching(), batch()


def broken():
    return nn.Linear(torch.nowhere, 3)


def number():
    return 7
"""


@pytest.fixture
def user_models(tmp_path: Path) -> str:
    """A module of the user in the directory where the command is started; its name is new for each test."""
    name = "models_" + "".join(c for c in tmp_path.name if c.isalnum())
    (tmp_path / f"{name}.py").write_text(USER_MODELS)
    return name


def test_trace_counts_parameters_flops_and_blocks(run: Run) -> None:
    found = json.loads(run("trace", GPT, "--json").out)
    hidden, vocabulary, sequence = 32, 64, 16
    block = 12 * hidden**2 + 13 * hidden
    assert found["parameters"] == 2 * block + (vocabulary + sequence + 2) * hidden
    assert found["tied"] == {"transformer.wte.weight": ["lm_head.weight"]}
    assert {block["count"]: block["parameters"] for block in found["blocks"]}[2] == block
    products = 2 * 12 * hidden**2 * sequence + hidden * vocabulary * sequence
    assert found["flops_per_sample"] > 6 * products  # and attention's scores
    assert found["flops_per_sample"] < 6 * products * 1.2
    assert found["operators_without_rule"] == []
    assert found["operators"]["autopar.cross_entropy_sum"] == 1


def test_trace_prints_a_summary(run: Run) -> None:
    done = run("trace", GPT, "--seq", "8")
    assert done.code == 0
    assert "transformer.h.0-1" in done.out
    assert "input       input_ids (2, 8) int64" in done.out
    assert "Every operator has a rule." in done.out


def test_trace_names_operators_without_a_rule(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.report.graph.has_rule", lambda target: target != "aten.layer_norm.default")
    done = run("trace", GPT)
    assert "Operators without a rule" in done.out
    assert "\n  aten.layer_norm.default" in done.out.split("Operators without a rule")[1]


def test_model_of_the_user_is_found_where_the_command_starts(run: Run, user_models: str) -> None:
    found = json.loads(run("trace", f"{user_models}:net", "--json").out)
    assert found["parameters"] == 8 * 16 + 16 + 16 * 8 + 8
    assert found["operators"]["aten.linear.default"] == 2


def test_model_that_cannot_be_traced_names_the_line(run: Run, user_models: str) -> None:
    done = run("trace", f"{user_models}:branching")
    assert done.code == 1
    line = 1 + USER_MODELS.splitlines().index("        if loss > 1:")
    assert f"{user_models}.py:{line}" in done.error
    assert "; " in done.error  # a remedy


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("nowhere.to.be:found", "the module of a model factory can be imported"),
        ("MODELS:number", "a model factory returns a model"),
        ("MODELS:nets", "did you mean net"),
        (
            "MODELS:broken",
            ".py:36: a model factory runs without arguments and returns a model, but found AttributeError",
        ),
        ("just-words", "package.module:factory"),
        ("gpt:layer=2", "did you mean layers?"),
        ("hf:gpt22", "did you mean gpt2"),
        ("hf:gpt2?n_layers=3", "did you mean n_layer"),
        ("gpt:layers=2,hidden=30,heads=4,vocab=64", "the heads divide the hidden size"),
    ],
)
def test_bad_model_gives_one_message(model: str, expected: str, run: Run, user_models: str) -> None:
    done = run("trace", model.replace("MODELS", user_models))
    assert done.code == 2
    assert expected in done.error
