import runpy
from pathlib import Path

import torch

from autopar import api
from autopar.api import estimate
from autopar.lower.program import lower
from tests.support.lower.ranks import assert_as_one_device, dense


def test_the_example_plans_and_its_program_computes_what_one_device_does() -> None:
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "custom_op.py"))
    plan = example["main"]()
    assert [note for note in plan.notes if "example.squash.default has no declared rule: found by execution" in note]
    torch.manual_seed(0)
    model = example["Model"]()
    batch = {"x": torch.randn(4, 16, 64), "labels": torch.randint(0, 10, (4, 16))}
    graph = api.trace(model, example_inputs=batch, name="custom")
    pins = ["tp=2", "up.*=tp:S(0)", "down.*=tp:S(1)"]
    plan = estimate(graph, cluster="cpu:1x2", global_batch_size=graph.batch_size, pins=pins)
    used = {name for layout in plan.layouts for typing in layout.typings[1:] for name in typing.strategies}
    assert "split f" in used
    parameters = dict(model.named_parameters())
    whole = {p.name: parameters[p.fqn].detach() for p in graph.parameters} | {k: v[:2] for k, v in batch.items()}
    loss, gradients = dense(graph, whole)
    program = lower(plan, graph)
    assert_as_one_device(program, whole, loss, gradients)
