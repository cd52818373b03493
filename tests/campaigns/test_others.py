from dataclasses import replace
from pathlib import Path

import pytest

from tools.campaigns import others
from tools.campaigns.models import SEQUENCE_LAYOUTS, Result
from tools.campaigns.others_page import PAGE, USED, Outcome, kept, page, sequence_page, standing
from tools.campaigns.types import TYPES

GOOD = Result(mesh="tp=2", loss=1e-7, gradient=2e-7, parameter=3e-7)
PAST = replace(GOOD, gradient=2e-2)
ROUNDED = replace(PAST, double=3e-13, alone="1e-07, 1e-02, 1e-06", verdict="rounding: the same plan agrees")
REFUSED = Result(error="tp divides 1 attention heads")


def outcome(*results: Result, traceback: str = "") -> Outcome:
    return Outcome(results=dict(zip(USED, results, strict=True)), num_operators=4, num_split=3, traceback=traceback)


OUTCOMES = {
    "opt": outcome(GOOD, GOOD, GOOD), "phi": outcome(GOOD, ROUNDED, GOOD), "phi3": outcome(GOOD, GOOD, REFUSED),
    "qwen2": Outcome(error="no inputs at /somewhere/site-packages/transformers/qwen2.py:3; give a factory"),
    "gemma2": outcome(GOOD, GOOD, GOOD, traceback="KeyError"),
    "olmo": outcome(GOOD, replace(PAST, verdict="wrong: the parallel program DIFFERS"), GOOD),
}  # fmt: skip


def test_the_summary_counts_each_type_once_by_its_worst_layout() -> None:
    text = page(OUTCOMES)
    head = text.split("| type ")[0]
    assert f"6 of {len(TYPES)} types were run" in head
    assert "within the limits in float32: 1\n" in head
    for kind, what in (
        ("phi", "shown in float64"), ("phi3", "some layouts"), ("gemma2", "no answer"), ("olmo", "wrong"),
    ):  # fmt: skip
        (line,) = (line for line in head.splitlines() if line.startswith("- ") and f"({kind})" in line)
        assert what in line
    assert "refused with a reason: 1 (qwen2)" in head
    assert f"not run: {len(TYPES) - 6} (" in head
    assert "**wrong** 1e-07, 2e-02, 3e-07" in text
    assert "site-packages" not in text


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    others._saved(OUTCOMES, path)
    again = others._loaded(path)
    assert page(again) == page(OUTCOMES)
    assert [standing(o) for o in again.values()] == [standing(o) for o in OUTCOMES.values()]
    assert not others._loaded(tmp_path / "none.json")


def test_a_page_is_kept_row_by_row_with_its_commits_unless_a_description_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"phi": "0123abc", "olmo": "0123abc", "qwen2": "4567def or before"}
    text = page({kind: replace(found, version=versions.get(kind, "")) for kind, found in OUTCOMES.items()})
    again = kept(text)
    assert page(again) == text
    assert [standing(o) for o in again.values()] == [standing(o) for o in OUTCOMES.values()]
    monkeypatch.setitem(TYPES, "phi", "num_hidden_layers=3")
    assert set(kept(text)) == set(OUTCOMES) - {"phi"}


def test_no_type_has_wrong_numbers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(kept(text)) == text
    assert not [line for line in text.splitlines() if line.startswith("|") and "**wrong**" in line]
    assert "Traceback" not in text


def test_rows_of_split_sequences_are_kept_one_by_one() -> None:
    def split(*results: Result, version: str) -> Outcome:
        return Outcome(results=dict(zip(SEQUENCE_LAYOUTS, results, strict=False)), version=version)

    first = sequence_page("", {"phi": split(GOOD, REFUSED, version="0123abc"), "opt": split(GOOD, version="0123abc")})
    again = sequence_page(first, {"phi": split(GOOD, GOOD, version="4567def")})
    assert [line.split()[1] for line in again.splitlines() if "0123abc" in line or "4567def" in line] == ["opt", "phi"]
    assert "tp divides 1 attention heads" in first
    assert "tp divides 1 attention heads" not in again
    assert sequence_page(again, {}) == again
