"""Names of values in emitted programs."""

from __future__ import annotations

from autopar.graph.graph import Ref
from autopar.lower.emit import str_name


def test_the_second_result_of_an_operator_is_not_called_as_its_second_call() -> None:
    """Two batch norms: the running mean of the first was taken for what the second one normalised."""
    values = [Ref("topk"), Ref("topk", 1), Ref("topk_1"), Ref("topk_1", 1)]
    assert len({str_name(ref) for ref in values}) == len(values)
