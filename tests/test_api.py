import inspect
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import api, errors
from autopar.errors import AutoparError, TraceError, UsageError
from autopar.request import Request
from tests.support.example_plans import llama_plan
from tests.support.planner.graphs import mlp
from tests.support.said import refuses

FUNCTIONS = {name: getattr(api, name) for name in ("trace", "search", "estimate", "parallelize", "verify")}
REQUEST = {field.name: field.default for field in fields(Request)}
FIRST = {"model", "plan"}
"""What needs no keyword."""
TRACED: dict[str, Any] = {"example_inputs": [torch.zeros(4, 8)], "loss_fn": lambda y, batch: y.square().mean()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_keywords_with_one_default_explained_in_one_place(name: str) -> None:
    found = inspect.signature(FUNCTIONS[name]).parameters
    positional = {p.name for p in found.values() if p.kind is not p.KEYWORD_ONLY}
    assert "model" in positional
    assert positional <= FIRST
    required = {"cluster", "global_batch_size"} if name in ("search", "estimate") else set()
    texts = [FUNCTIONS[name], Request, *([api.search] if name == "parallelize" else [])]
    text = "\n".join(inspect.getdoc(one) or "" for one in texts)
    for parameter in found.values():
        assert parameter.name in text, parameter.name
        if parameter.name in REQUEST:
            expected = parameter.empty if parameter.name in required else REQUEST[parameter.name]
            assert parameter.default == expected, parameter.name
    assert len(inspect.getsource(FUNCTIONS[name]).splitlines()) <= 60, "read on one screen"


def test_no_keyword_leaves_open_what_it_is_of() -> None:
    names = {p for f in FUNCTIONS.values() for p in inspect.signature(f).parameters}
    timeouts = {name for name in names if "timeout" in name}
    assert timeouts == {"search_timeout_s", "collective_timeout_s", "run_timeout_s"}
    assert {name for name in names if "seed" in name} == {"seed", "sampler_seed"}
    assert [name for name, f in FUNCTIONS.items() if "seed" in inspect.signature(f).parameters] == ["parallelize"]


def test_every_kind_of_error_is_exported() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AutoparError)}
    assert kinds <= set(autopar.__all__)
    assert all(getattr(autopar, name) is getattr(errors, name) for name in kinds)


# --- requests


@pytest.mark.parametrize(("given", "message"), [
    ({"cluster": None}, "Missing cluster"),
    ({"global_batch_size": None}, "Missing global batch"),
    *(({name: wrong}, f"{name} takes texts, but got {said}. Write {name}=[") for name in ("pins", "opaque")
      for wrong, said in (({"tp": 2}, "{'tp': 2}"), (2, "2"), ([("tp", 2)], "('tp', 2)"), (None, "None"))),
    ({"cluster": 8}, "cluster takes a text, but got 8. Write for example cluster='h100-sxm5-80gb:4x8'"),
    ({"precision": torch.bfloat16}, "precision takes a text, but got torch.bfloat16"),
    ({"precision": None}, "precision takes a text, but got None"),
    ({"space": None}, "space takes a text, but got None"),
    ({"optimizer": torch.optim.Adam}, "optimizer takes a text, but got <class"),
    ({"sampler": 3}, "sampler takes a text, but got 3"),
    ({"sampler": "tpe", "sampler_seed": "a"}, "The sampler_seed is 'a'"),
    ({"sampler": "tpe", "sampler_seed": True}, "The sampler_seed is True. Give a whole number."),
    ({"trials": "9"}, "The number trials is '9'. Give a whole number, at least 1."),
    ({"trials": True}, "The number trials is True"),
    ({"search_timeout_s": "5"}, "The search_timeout_s is '5'. Give a number of seconds"),
    ({"search_timeout_s": True}, "The search_timeout_s is True"),
    ({"max_step_time_s": 10**400}, "The max_step_time_s is 1000"),
    ({"workers": 1.5}, "The number workers is 1.5"),
    ({"workers": True}, "The number workers is True"),
    ({"pins": ["layer.0.up=tp:S(0)"]}, "No parameter of the model matches 'layer.0.up'. Did you mean 'layers.0.up'"),
    ({"global_batch_size": 0}, "The global batch is 0"),
    ({"global_batch_size": 4.5}, "The global batch is 4.5"),
    ({"global_batch_size": True}, "The global batch is True"),
    ({"workers": 0}, "The number workers is 0"),
    ({"trials": 0}, "The number trials is 0"),
    ({"sampler": "tep"}, "Did you mean 'tpe'"),
    ({"search_timeout_s": -1.0}, "The search_timeout_s is -1.0"),
    ({"study_name": "mine"}, "Say which with --storage"),
    ({"storage": "sqlite://", "workers": 2}, "Leave it out for a temporary file"),
    ({"global_batch_size": 10**400}, "Give a whole number, at least 1, at most 16,777,216."),
    ({"storage": Path("study.db")}, "storage takes a text, but got PosixPath('study.db')"),
    ({"storage": "sqlite://", "study_name": 3}, "study_name takes a text, but got 3"),
    ({"precision": "bf16"}, "computes in bfloat16. Give precision='fp32', or trace the model with precision='bf16'"),
    ({"progress": 3}, "The progress is 3. Give a function of (what, done, total)"),
    ({"name": "mine"}, "name cannot be given with a graph. Give name to autopar.trace"),
    ({"loss_fn": max}, "loss_fn cannot be given with a graph. Give loss_fn to autopar.trace"),
])  # fmt: skip
def test_arguments_of_another_kind_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        autopar.search(mlp(), **{"cluster": "cpu:1x2", "global_batch_size": 4, **given})


@pytest.mark.parametrize(
    "inputs",
    [3, "x", {1, 2}, iter([]), {3: torch.zeros(4, 8)}],
    ids=["number", "text", "set", "iterator", "number as name"],
)
def test_example_inputs_that_are_no_batch_are_refused(inputs: Any) -> None:
    net, said = torch.nn.Linear(8, 8), "Give a batch: a dict of tensors by the names of forward's parameters"
    refuses(UsageError, said, autopar.trace, net, example_inputs=inputs)
    refuses(UsageError, said, autopar.verify, net, llama_plan(), example_inputs=inputs)


def test_what_is_no_plan_text_or_batch_is_refused() -> None:
    net, rows = torch.nn.Linear(2, 2), [torch.zeros(2, 2)]
    refuses(UsageError, "The global batch is 0", autopar.trace, net, example_inputs=rows, global_batch_size=0)
    refuses(UsageError, "opaque takes texts", autopar.estimate, mlp(), cluster="cpu:1x2", global_batch_size=4, opaque=2)
    for use in (autopar.Plan.load, llama_plan().save):
        refuses(UsageError, "path takes a path, but got 3", use, 3)
    for given, message in (
        ({"steps": "x"}, "The number steps is 'x'"),
        ({"steps": True}, "The number steps is True"),
        ({"run_timeout_s": math.nan}, "The run_timeout_s is nan"),
        ({"run_timeout_s": "5"}, "The run_timeout_s is '5'"),
        ({"compare_in": "bf16"}, "There is no compare_in='bf16'. Give fp32 or fp64"),
    ):
        refuses(UsageError, message, autopar.verify, net, llama_plan(), **given)
    for function in (autopar.verify, lambda model, plan: autopar.parallelize(model, plan=plan)):
        refuses(UsageError, "The plan 3 is neither a Plan nor the path of a file", function, net, 3)


def test_a_compiled_model_is_traced_as_the_model_in_it() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    plain, compiled = (autopar.trace(model, **TRACED) for model in (net, torch.compile(net)))
    assert [op.target for op in compiled.ops] == [op.target for op in plain.ops]
    assert compiled.inputs == plain.inputs


@pytest.mark.parametrize("loss_fn", [torch.nn.MSELoss(), lambda y, batch: (y - batch["label"]).mean()])
def test_a_loss_fn_that_fails_is_told_what_it_gets(loss_fn: Any) -> None:
    said = "The loss_fn fails: .*It gets the model's output and the batch, a dict"
    refuses(TraceError, said, autopar.trace, torch.nn.Linear(8, 8), **TRACED | {"loss_fn": loss_fn})


def test_one_text_of_pins_means_what_it_means_in_the_shell() -> None:
    one, several = (
        autopar.estimate(mlp(), cluster="cpu:1x2", global_batch_size=4, pins=pins)
        for pins in ("tp=2, recompute=none", ["tp=2", "recompute=none"])
    )
    assert one.mesh.tp == 2
    assert one.pins == several.pins == ("tp=2", "recompute=none")


def test_a_graph_stands_for_the_model_that_it_was_traced_of() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    given: dict[str, Any] = {"cluster": "cpu:1x2", "global_batch_size": 4, "pins": "tp=2"}
    graph = autopar.trace(net, **TRACED)
    for function in (autopar.search, autopar.estimate):
        one, other = function(graph, **given), function(net, **given, **TRACED)
        assert one.diff(other) == []
        assert one.pins == ("tp=2",)
