"""Rules found by execution agree with the declared ones."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.rules.by_execution import verify_rule
from autopar.rules.missing import discover_rule
from autopar.rules.table import RuleTable
from tests.support.rule_examples import Maker

make = Maker()

CALLS = {
    "linalg_inv": (make.call("aten.linalg_inv.default", make.real(4, 6, 6) + 9), "a b^ c^ -> a d^ e^"),
    "relu": (make.call("aten.relu.default", make.real(4, 6)), "a b -> a b"),
    "add": (make.call("aten.add.Tensor", make.real(4, 6), make.real(4, 6)), "a b, a b -> a b; linear 0+1"),
    "mm": (make.call("aten.mm.default", make.real(4, 6), make.real(6, 8)), "c a+, a+ b -> c b; linear 0, 1"),
    "softmax": (make.call("aten.softmax.int", make.real(4, 6), 1), "a b^ -> a c^"),
    "cdist": (make.call("aten.cdist.default", make.real(2, 4, 8), make.real(2, 6, 8)), "a c d^, a b e^ -> a c b"),
}


@pytest.mark.parametrize("name", CALLS)
def test_discovered_lines_hold_and_say_what_is_known(name: str) -> None:
    example, expected = CALLS[name]
    line = discover_rule(example.op, example.operands)
    assert line == expected
    table = RuleTable(rules={})
    table.register(example.target, line)
    assert verify_rule(example.op, example.operands, size=2, table=table) == []


def test_a_random_operator_has_no_rule_to_discover() -> None:
    example = make.call("aten.dropout.default", make.real(4, 6), 0.5, True)
    with pytest.raises(RuleError, match="different results when it runs twice"):
        discover_rule(example.op, example.operands)
