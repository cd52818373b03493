"""Prices of blocks for the lower bounds: the least of several, and lines below what freeing bytes takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from autopar.cost.model import BlockCost
from autopar.cost.step.stage_time import own_times
from autopar.planner.bounds.bound_rows import BlockPrice

_PARTS = tuple(field.name for field in fields(BlockPrice))
NOTHING = BlockPrice(**dict.fromkeys(_PARTS, 0.0))


def least_of(prices: Iterable[BlockPrice]) -> BlockPrice:
    """The least of each part, of the backward too: what takes the least time need not have the least forward."""
    found = list({id(price): price for price in prices}.values())
    if len(found) == 1:
        return found[0]
    least = {name: min(getattr(price, name) for price in found) for name in _PARTS}
    backward_s = min(price.time_s - price.forward_s for price in found)
    least["time_s"] = min(least["time_s"], least["forward_s"] + backward_s)
    byte_s, held = least["more_byte_s"], least["held_bytes"]
    least["more_free_s"] = max(p.more_free_s - byte_s * (p.held_bytes - held) for p in found)
    return BlockPrice(**least)


def again_prices(seconds: Sequence[float], held: Sequence[float]) -> dict[str, float]:
    """What :class:`BlockPrice` says of recompute, from the seconds and the bytes of each mode: lines below all of them."""
    most_s, most = min(seconds), max(held)
    freeing = [(own_s - most_s, most - size) for own_s, size in zip(seconds, held, strict=True) if size < most]
    if not freeing:
        return {"again_s": max(seconds) - most_s, "least_again_s": max(seconds) - most_s}
    all_bytes = max(freed for _, freed in freeing)
    all_s = min(own_s for own_s, freed in freeing if freed == all_bytes)
    before = [(0.0, 0.0), *(point for point in freeing if point[1] < all_bytes)]
    last_s = max((all_s - own_s) / (all_bytes - freed) for own_s, freed in before)
    return {
        "again_s": min(own_s / freed for own_s, freed in freeing) * all_bytes,
        "least_again_s": min(own_s for own_s, _ in freeing),
        "more_byte_s": last_s if len(before) > 1 else 0.0,
        "more_free_s": last_s * all_bytes - all_s if len(before) > 1 else 0.0,
        "some_bytes": most - max(freed for _, freed in before),
        "full_s": all_s,
    }


def moving_price(price: BlockPrice, cost: BlockCost, share: float, down_s: float, *, is_free: bool) -> BlockPrice:
    """A price of a block that may keep on the host what its backward needs, or recompute fully.

    A stage waits for its copies down no less than ``share`` of what they take over its forwards, beside what is recomputed:
    that is linear in its blocks. Others than those of the group may stand beside them: see ``BlockPrice.beside_s``.

    Args:
        share: from 0 to 1; of all blocks the same.
        down_s: of what the block keeps.
        is_free: no pin says what it recomputes; else it counts as if it kept nothing.
    """
    kept = cost.saved_bytes if is_free else 0
    freed = kept - cost.input_bytes
    beside_s = share * own_times(cost, "none")[0]
    byte_s = share * down_s / kept if kept else 0.0
    return replace(
        price,
        again_s=0.0,
        least_again_s=0.0,
        held_bytes=kept,
        held_again_bytes=0.0,
        lean_bytes=price.lean_bytes + price.held_again_bytes if is_free else 0.0,
        more_byte_s=min(byte_s, price.full_s / freed) if freed > 0 else byte_s,
        more_free_s=beside_s,
        beside_s=beside_s,
        some_bytes=0.0,
        full_s=0.0,
    )
