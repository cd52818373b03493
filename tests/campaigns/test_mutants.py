import pytest

from tools.campaigns.mutants import mutate


@pytest.mark.slow
def test_rules_made_wrong_in_one_place_are_caught() -> None:
    outcome = mutate(every_nth=17)
    assert outcome.survivors == []
    assert outcome.mutants > 800
    assert len(outcome.rules) > 200
    assert outcome.caught > 0.95 * outcome.mutants
