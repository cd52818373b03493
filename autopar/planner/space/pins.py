"""Pins: constraints of the user on the plan, which every plan satisfies exactly.

The table in :mod:`~autopar.planner.space.pin_syntax`, which ``autopar pins`` prints, lists the kinds of pins. Pins are given as options,
in a file (``--pin @FILE``, one in a line, ``#`` before a remark) and at modules of the model (:mod:`autopar.pins.on_modules`). If two pins
concern one block, options win over modules, and later pins over earlier ones.

A selector is a dotted path whose parts may be ``*`` or a range. It selects the blocks whose label contains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopar.errors import UsageError, closest
from autopar.graph.graph import Graph
from autopar.graph.rewrites import vocabulary_sizes
from autopar.plan.plan import BUCKET_BYTES, Recompute
from autopar.planner.space.pin_syntax import (
    BUCKET,
    ActivationPin,
    ChoicePin,
    NumberPin,
    OpaquePin,
    ParameterPin,
    Pin,
    RecomputePin,
    StagePin,
    parse_pin,
)


def replaced(pins: Iterable[str], others: Sequence[str]) -> list[str]:
    """Return the pins, with ``others`` in place of those on the same subject.

    >>> replaced(["tp<=4", "recompute=full@layers.0-3"], ["tp=8"])
    ['recompute=full@layers.0-3', 'tp=8']
    """
    subjects = {_subject(pin) for pin in others}
    return [*(pin for pin in pins if _subject(pin) not in subjects), *others]


def _subject(pin: str) -> str:
    return re.split(r"[<>=!]", pin, maxsplit=1)[0].strip()


def select_blocks(graph: Graph, selector: str, *, pin: str) -> tuple[int, ...]:
    """Return the indices of the blocks that a selector names.

    It is matched with the labels of blocks; if none matches, with the modules that a label joins (``norm+lm_head``). An empty selector names
    all blocks.

    Raises:
        UsageError: the selector matches no block; the message lists labels.
    """
    blocks = tuple(b.index for b in graph.blocks if not selector or _label_matches(b.label, selector))
    if not blocks:
        blocks = tuple(b.index for b in graph.blocks if any(_label_matches(m, selector) for m in b.label.split("+")))
    if not blocks:
        labels = list(dict.fromkeys(b.label for b in graph.blocks if b.label))
        raise UsageError(
            f"No block of the model matches '{selector}'",
            where=f"pin '{pin}'",
            fix=f"Blocks: {', '.join(labels if len(labels) <= 6 else [*labels[:3], '...', *labels[-2:]]) or 'none'}",
        )
    return blocks


def _label_matches(label: str, selector: str) -> bool:
    parts, wanted = label.split("."), selector.split(".")
    return any(
        all(_part_matches(part, want) for part, want in zip(parts[i : i + len(wanted)], wanted, strict=True))
        for i in range(len(parts) - len(wanted) + 1)
    )


def _part_matches(part: str, wanted: str) -> bool:
    span = re.fullmatch(r"(\d+)-(\d+)", wanted)
    if span:
        return part.isdecimal() and int(span[1]) <= int(part) <= int(span[2])
    return fnmatchcase(part, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """All pins of one search.

    Attributes:
        pins: the pins, in the order in which they were given.
    """

    pins: tuple[Pin, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Pins:
        return cls(pins=tuple(parse_pin(text) for text in texts))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(pin.text for pin in self.pins)

    def without(self, text: str) -> Pins:
        """Return all pins but those with this text, for finding a conflict."""
        return Pins(pins=tuple(pin for pin in self.pins if pin.text != text))

    def allows(self, key: str, value: int | str) -> bool:
        """Return whether every pin on ``key`` holds for ``value``."""
        on_key = (pin for pin in self.pins if isinstance(pin, NumberPin | ChoicePin) and pin.key == key)
        return all(pin.holds(value) for pin in on_key)

    def buckets(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the bucket sizes in bytes that all pins allow, the default size first.

        The sizes are those of ``sizes``, and those that pins name or border on.

        Raises:
            UsageError: no size satisfies the pins.
        """
        on_buckets = [pin for pin in self.pins if isinstance(pin, NumberPin) and pin.key == BUCKET]
        named = [pin.value + {"<": -1, ">": 1}.get(pin.relation, 0) for pin in on_buckets]
        allowed = [size for size in dict.fromkeys((*sizes, *named)) if size > 0 and self.allows(BUCKET, size)]
        if not allowed:
            raise UsageError(
                f"No bucket size holds for {', '.join(pin.text for pin in on_buckets)}",
                fix="Write for example bucket_bytes=26214400",
            )
        return tuple(sorted(allowed, key=lambda size: (size != BUCKET_BYTES, size)))

    @property
    def parameters(self) -> tuple[ParameterPin, ...]:
        return tuple(pin for pin in self.pins if isinstance(pin, ParameterPin))

    @property
    def opaque(self) -> tuple[str, ...]:
        """The names of the modules that are not traced."""
        return tuple(pin.name for pin in self.pins if isinstance(pin, OpaquePin))

    def recompute(self, graph: Graph) -> dict[int, Recompute]:
        """Return the pinned recompute mode by block index; later pins win over earlier ones."""
        modes: dict[int, Recompute] = {}
        for pin in self.pins:
            if isinstance(pin, RecomputePin):
                modes |= dict.fromkeys(select_blocks(graph, pin.selector, pin=pin.text), pin.mode)
        return modes

    def offloaded(self, graph: Graph) -> frozenset[int]:
        """Return the indices of the blocks whose activations are pinned to the host."""
        on_host = [pin for pin in self.pins if isinstance(pin, ActivationPin)]
        return frozenset(i for pin in on_host for i in select_blocks(graph, pin.selector, pin=pin.text))

    def stages(self, graph: Graph) -> dict[int, int]:
        """Return the pinned stage by block index."""
        return {block: stage for _, block, stage in self.staged(graph)}

    def staged(self, graph: Graph) -> tuple[tuple[str, int, int], ...]:
        """Return the pin's text, the block and the stage for each block with a pinned stage, in the order of blocks; the last pin wins."""
        by_block: dict[int, tuple[str, int, int]] = {}
        for pin in self.pins:
            if isinstance(pin, StagePin):
                blocks = select_blocks(graph, pin.selector, pin=pin.text)
                by_block |= {block: (pin.text, block, pin.stage) for block in blocks}
        return tuple(by_block[block] for block in sorted(by_block))

    def check(self, graph: Graph) -> None:
        """Check that the model has the blocks, parameters, experts and vocabularies that the pins name.

        Raises:
            UsageError: the model lacks one of these, or pins on activations contradict each other.
        """
        modes, offloaded = self.recompute(graph), self.offloaded(graph)
        self.stages(graph)
        if both := [i for i in offloaded if modes.get(i) == "selective"]:
            raise UsageError(
                "A block cannot have its activations on the host and recompute selectively",
                where=f"block {graph.blocks[min(both)].label or min(both)}",
                fix="Pin recompute=none or full there, or leave the block on the device",
            )
        if not (self.allows("ep", 1) and self.allows("ep_data", 1)) and not any(
            op.target == "autopar.experts" for op in graph.ops
        ):
            raise UsageError(
                "The model has no experts that ep could split",
                where=graph.name,
                fix="Drop the pin of ep, or write the experts with autopar.nn.Experts",
            )
        if not self.allows("vocab_multiple", 1) and not vocabulary_sizes(graph):
            raise UsageError(
                "The model has no vocabulary that vocab_multiple could pad",
                where=graph.name,
                fix="Drop the pin of vocab_multiple",
            )
        pinned = self.parameters
        names = [name for p in graph.parameters for name in (p.key, p.fqn, *p.aliases)] if pinned else []
        for pin in pinned:
            if not pin.matches(names):
                raise UsageError(
                    f"No parameter of the model matches '{pin.pattern}'",
                    where=f"pin '{pin.text}'",
                    fix=closest(pin.pattern, names) if len(names) <= 50 else f"Name one such as {names[0]}",
                )
