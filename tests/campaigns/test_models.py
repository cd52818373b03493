from pathlib import Path

import pytest

from tools.campaigns.models import FAMILIES, LAYOUTS, PAGE, SEQUENCE_LAYOUTS, Result, Row, main, read
from tools.campaigns.page import page


@pytest.mark.distributed
def test_a_part_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    layouts = ["--layout", "ep2", "--layout", "cp2 ring", "--results", str(results)]
    assert main(["--family", "BLOOM", "--family", "MoE by hand", *layouts]) == 0
    rows = read(results)
    assert rows["MoE by hand"].results["ep2"].is_within
    assert list(rows["MoE by hand"].results) == ["ep2"]
    assert "attention is written out" in rows["BLOOM"].results["cp2 ring"].error
    assert "BLOOM: 79 of 80 operators split" in capsys.readouterr().out


def test_the_page_holds_every_family_under_every_layout_that_concerns_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    base, sequences = (part.split("\n\n")[0] for part in text.split("| family ")[1:])
    for name in FAMILIES:
        cells = _cells(base, name)
        assert all(cells[: len(LAYOUTS)]), name
        assert all(_cells(sequences, name)), name
    assert all(all(_cells(base, name)) for name in ("Mixtral", "Qwen3-MoE", "DeepSeek-V3", "MoE by hand"))
    assert "**wrong**" not in text


def _cells(table: str, name: str) -> list[str]:
    line = next((line for line in table.splitlines() if line.startswith(f"| {name} |")), "")
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_page_shows_both_figures_of_rounding_and_a_word_for_what_does_not_apply() -> None:
    row = Row(spec="m", num_operators=4, num_split=3, whole={"aten.div.Tensor": 1}, has_attention=True)
    past = {"loss": 1e-7, "gradient": 3e-4, "parameter": 1e-6}
    row.results = {layout: Result(mesh="tp=4", **past) for layout in LAYOUTS}
    row.results["search"] = Result(**past, double=2e-13, alone="1e-07, 4e-04, 1e-06", verdict="rounding: to 2e-13")
    row.results["cp2 ring"] = Result(error="these conflict: 2 * cp divides the sequence of 17 (ring); cp=2")
    text = page({"M": row})
    assert "| M | 1e-07, 3e-04, 1e-06; f64 2e-13 | **wrong** 1e-07, 3e-04, 1e-06 |" in text
    assert "no: 17 tokens" in text
    assert "one device alone is off by 1e-07, 4e-04, 1e-06 from itself in float64. Rounding: to 2e-13." in text
    assert "3 (75.0%) have a strategy that splits" in text
    assert set(SEQUENCE_LAYOUTS) == {f"cp{n} {kind}" for n in (2, 4) for kind in ("gather", "ulysses", "ring")}
