import json
import re

import pytest

from autopar.planner.space import pin_syntax
from autopar.planner.space.pin_syntax import PIN_KINDS, PinKind, parse_pin
from tests.support.cli_runner import Run

SAME = {"zero_stage", "micro_batch_size"}
"""Other names of what the table has."""


@pytest.mark.parametrize("kind", PIN_KINDS, ids=lambda kind: kind.example)
def test_each_example_is_a_pin_of_its_form(kind: PinKind) -> None:
    assert parse_pin(kind.example).text == kind.example
    name = re.split(r"[ =@\[]", kind.form)[0]
    assert name in kind.example or name == "PARAMETER"


def test_every_name_has_a_row() -> None:
    named = {re.split(r"[ =\[]", form)[0] for kind in PIN_KINDS for form in kind.form.split(", ")}
    known = {name.partition("=")[0] for name in pin_syntax._KEYS}
    assert known - SAME == named


def test_the_table_in_the_shell(run: Run) -> None:
    text = run("pins").out
    assert all(kind.example in text for kind in PIN_KINDS)
    assert json.loads(run("pins", "--json").out)["zero=1"]["holds"] == "ZeRO stage, 0 to 3"
