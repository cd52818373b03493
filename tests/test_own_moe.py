import runpy
from pathlib import Path


def test_the_experts_of_the_example_stand_on_data_ranks() -> None:
    made = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "own_moe.py"))["main"]()
    assert (made.mesh.ep, made.mesh.ep_data, made.num_micro_batches) == (4, 4, 1)
    notes = "\n".join(made.notes)
    assert "mixtures of experts (2): experts spread and tokens sent over 4 data ranks" in notes
    assert "statistics over the global batch" in notes
