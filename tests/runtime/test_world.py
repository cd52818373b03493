"""A job on different devices has to number its nodes as the plan counts them."""

from __future__ import annotations

import pytest

from autopar.errors import RuntimeMismatchError
from autopar.plan import RankGroup
from autopar.runtime.world import check_groups

GROUPS = (RankGroup(start=0, stop=2, device="a100-sxm4-40gb"), RankGroup(start=2, stop=4, device="h100-sxm5-80gb"))
A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"


def test_nodes_in_the_order_of_the_plan_are_accepted() -> None:
    check_groups(GROUPS, [A100, A100, H100, H100])
    check_groups(GROUPS, ["one", "one", "other", "other"])  # devices without a shipped profile: nothing is known


@pytest.mark.parametrize("names", [[H100, H100, A100, A100], [A100, H100, A100, H100], ["one", "other", H100, H100]])
def test_another_order_is_refused_with_the_remedy(names: list[str]) -> None:
    with pytest.raises(RuntimeMismatchError, match="--node-rank"):
        check_groups(GROUPS, names)
