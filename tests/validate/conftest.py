"""For all tests of published runs."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from autopar.graph.graph import Graph
from autopar.validate.express import Expressed, Sizes

GRAPHS: dict[Sizes, Graph] = {}


@pytest.fixture(autouse=True, scope="module")
def models_of_equal_sizes_are_traced_once() -> Iterator[None]:
    """By all sessions of a process: a graph depends on its sizes alone, and tracing takes most of a test's time."""
    begin = Expressed.__init__

    def sharing(self: Expressed) -> None:
        begin(self)
        self._graphs = GRAPHS

    with mock.patch.object(Expressed, "__init__", sharing):
        yield
