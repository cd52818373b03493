from pathlib import Path

import pytest

from autopar.rules.table import Rule, default_table, torch_rules
from tools.campaigns.fuzz import Tally, run_chunk
from tools.campaigns.mutants import mutate
from tools.campaigns.pairs import check_pair
from tools.campaigns.saved import read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning"),
    # a block may give a view; what emitted code calls changes nothing in place
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


def test_random_models_under_random_plans_compute_what_one_device_does() -> None:
    tally = Tally()
    for number in range(4, 8):
        tally.add(run_chunk(40, number, None))
    assert tally.wrong == 0
    assert len(tally.seen) > 70
    assert len({target for target, _ in tally.strategies}) > 20


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_campaigns_found_stays_right(path: Path) -> None:
    assert check_pair(read(path), checked=True) == ""


def test_rules_made_wrong_in_one_place_are_caught() -> None:
    outcome = mutate(every_nth=17)
    assert outcome.survivors == []
    assert outcome.mutants > 800
    assert len(outcome.rules) > 200
    assert outcome.caught > 0.95 * outcome.mutants


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that every summand of a split contraction adds: only execution tells."""
    wrong = Rule(line="b... k+, n k+, n -> b... n; linear 0, 1")
    monkeypatch.setitem(default_table().rules, "aten.linear.default", wrong)
    default_table().put("aten.linear.default", wrong)
    chunks = ((20, 7), *((40, seed) for seed in (5, 2, 6, 0, 1, 3, 4, 7)))  # the first one finds it as a rule
    try:
        found = any(run_chunk(count, seed, None, shrink=False).wrong for count, seed in chunks)
    finally:
        default_table().put("aten.linear.default", torch_rules()["aten.linear.default"])
    assert found


def test_what_is_wrong_once_is_counted_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["", "AssertionError: a rank hangs"])
    monkeypatch.setattr("tools.campaigns.fuzz.problem_of", lambda pair, checked: next(said, ""))
    assert run_chunk(20, 5, tmp_path).wrong == 1
    assert "once, and not when run again" in capsys.readouterr().err
    assert read(tmp_path / "seed5.json")
