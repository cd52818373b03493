"""Pins: constraints that a person puts on the plan, respected exactly.

What kinds there are says the table of :mod:`~autopar.planner.space.pin_syntax`, which ``autopar pins`` prints.
Pins stand in options, in a file (``--pin @FILE``, one in a line, ``#`` before a remark) and at modules of the model
(:mod:`autopar.pins.on_modules`); where two speak of one block, options win over modules, and later ones over earlier ones.

A selector is a dotted path whose parts may be ``*`` or a range: it selects the blocks whose label contains it.
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
    """The pins with ``others`` in place of those that are about the same.

    >>> replaced(["tp<=4", "recompute=full@layers.0-3"], ["tp=8"])
    ['recompute=full@layers.0-3', 'tp=8']
    """
    about = {_subject(pin) for pin in others}
    return [*(pin for pin in pins if _subject(pin) not in about), *others]


def _subject(pin: str) -> str:
    return re.split(r"[<>=!]", pin, maxsplit=1)[0].strip()


def select_blocks(graph: Graph, selector: str, *, pin: str) -> tuple[int, ...]:
    """Indices of the blocks that a selector names: by their labels, else by one of the modules that a label joins (``norm+lm_head``).

    Raises:
        UsageError: it names none; says which labels there are.
    """
    found = tuple(b.index for b in graph.blocks if not selector or _label_matches(b.label, selector))
    if not found:
        found = tuple(b.index for b in graph.blocks if any(_label_matches(m, selector) for m in b.label.split("+")))
    if not found:
        labels = list(dict.fromkeys(b.label for b in graph.blocks if b.label))
        raise UsageError(
            f"No block of the model matches '{selector}'",
            where=f"pin '{pin}'",
            fix=f"Blocks: {', '.join(labels if len(labels) <= 6 else [*labels[:3], '...', *labels[-2:]]) or 'none'}",
        )
    return found


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
    """All pins of one search."""

    pins: tuple[Pin, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Pins:
        return cls(pins=tuple(parse_pin(text) for text in texts))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(pin.text for pin in self.pins)

    def without(self, text: str) -> Pins:
        """All pins but one; for finding those that conflict."""
        return Pins(pins=tuple(pin for pin in self.pins if pin.text != text))

    def allows(self, key: str, value: int | str) -> bool:
        """Whether every pin on ``key`` holds for ``value``."""
        own = (pin for pin in self.pins if isinstance(pin, NumberPin | ChoicePin) and pin.key == key)
        return all(pin.holds(value) for pin in own)

    def buckets(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes of buckets to choose from: those of ``sizes`` and of the pins that all pins allow; the usual one first.

        Raises:
            UsageError: there is none.
        """
        own = [pin for pin in self.pins if isinstance(pin, NumberPin) and pin.key == BUCKET]
        named = [pin.value + {"<": -1, ">": 1}.get(pin.relation, 0) for pin in own]
        found = [size for size in dict.fromkeys((*sizes, *named)) if size > 0 and self.allows(BUCKET, size)]
        if not found:
            raise UsageError(
                f"No bucket size holds for {', '.join(pin.text for pin in own)}",
                fix="Write for example bucket_bytes=26214400",
            )
        return tuple(sorted(found, key=lambda size: (size != BUCKET_BYTES, size)))

    @property
    def parameters(self) -> tuple[ParameterPin, ...]:
        return tuple(pin for pin in self.pins if isinstance(pin, ParameterPin))

    @property
    def opaque(self) -> tuple[str, ...]:
        """Names of the modules that run as they are written."""
        return tuple(pin.name for pin in self.pins if isinstance(pin, OpaquePin))

    def recompute(self, graph: Graph) -> dict[int, Recompute]:
        """The pinned recompute by block index; later pins win over earlier ones."""
        found: dict[int, Recompute] = {}
        for pin in self.pins:
            if isinstance(pin, RecomputePin):
                found |= dict.fromkeys(select_blocks(graph, pin.selector, pin=pin.text), pin.mode)
        return found

    def moved(self, graph: Graph) -> frozenset[int]:
        """Blocks whose activations live on the host."""
        found = [pin for pin in self.pins if isinstance(pin, ActivationPin)]
        return frozenset(i for pin in found for i in select_blocks(graph, pin.selector, pin=pin.text))

    def stages(self, graph: Graph) -> dict[int, int]:
        """The pinned stage by block index."""
        return {block: stage for _, block, stage in self.staged(graph)}

    def staged(self, graph: Graph) -> tuple[tuple[str, int, int], ...]:
        """The blocks whose stage is pinned, in order: the pin (of several the last one), the block, its stage."""
        found: dict[int, tuple[str, int, int]] = {}
        for pin in self.pins:
            if isinstance(pin, StagePin):
                blocks = select_blocks(graph, pin.selector, pin=pin.text)
                found |= {block: (pin.text, block, pin.stage) for block in blocks}
        return tuple(found[block] for block in sorted(found))

    def check(self, graph: Graph) -> None:
        """Refuse pins that name blocks or parameters which the model does not have.

        Raises:
            UsageError: names the pin, with suggestions.
        """
        modes, moved = self.recompute(graph), self.moved(graph)
        self.stages(graph)
        if both := [i for i in moved if modes.get(i) == "selective"]:
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
        if self.opaque and not any(op.target == "autopar.opaque" for op in (*graph.prelude, *graph.ops)):
            raise UsageError(
                f"The model was traced without opaque='{self.opaque[0]}'",
                where=graph.name,
                fix="Give the model instead of its graph, or trace it with opaque=[...]",
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
