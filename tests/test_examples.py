import runpy
from pathlib import Path
from typing import Any

import torch

from tests.support.lower.against_model import check

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_the_operator_of_the_example_is_split_and_computes_what_one_device_does() -> None:
    made = example("custom_op")
    assert [
        note
        for note in made["main"]().notes
        if "example.squash.default has no declared rule: found by execution" in note
    ]
    batch = {"x": torch.randn(4, 16, 64), "labels": torch.randint(0, 10, (4, 16))}
    plan = check(made["Model"](), batch, ["tp=2", "up.*=tp:S(0)", "down.*=tp:S(1)"])
    assert any("split f" in typing.strategies for layout in plan.layouts for typing in layout.typings[1:])


def test_the_experts_of_the_example_stand_on_data_ranks() -> None:
    made = example("own_moe")["main"]()
    assert (made.mesh.ep, made.mesh.ep_data, made.num_micro_batches) == (4, 4, 1)
    notes = "\n".join(made.notes)
    assert "mixtures of experts (2): experts spread and tokens sent over 4 data ranks" in notes
    assert "statistics over the global batch" in notes
