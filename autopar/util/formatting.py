"""Formats numbers, sizes, lists of labels and tables as plain text for people, and reads sizes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

_NUMBER = re.compile(r"(\d+)")
_SIZE = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?:([kmgt]?)(i?)b?)\s*", re.IGNORECASE)

SIZE = "a number of bytes above zero, with a unit if you like (1e9, 80GB, 80GiB)"
"""What :func:`bytes_of` reads, for error messages."""


def seconds(value_s: float) -> str:
    """Format a time with three significant digits in a suitable unit.

    >>> seconds(0.45), seconds(12.3), seconds(0.00021), seconds(0)
    ('450 ms', '12.3 s', '210 us', '0 s')
    """
    if value_s == 0:
        return "0 s"
    return _in_units(value_s, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))) or f"{_digits(value_s / 1e-9)} ns"


def num_bytes(value: float) -> str:
    """Format a number of bytes in binary units.

    >>> num_bytes(31 * 2**30), num_bytes(1536), num_bytes(12)
    ('31 GiB', '1.5 KiB', '12 B')
    """
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return _in_units(value, units) or f"{value:.0f} B"


def bytes_of(size: object) -> int | None:
    """Return the bytes of a number or text, with or without a unit; None if it is no size, or less than a byte.

    >>> bytes_of("80GiB") == 80 * 2**30, bytes_of("20 KB"), bytes_of("1e9"), bytes_of(7), bytes_of("7 parsecs")
    (True, 20000, 1000000000, 7, None)
    """
    found = _SIZE.fullmatch(str(size))
    if found is None or (found[3] and not found[2]):
        return None
    number = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    return int(number) if 1.0 <= number < math.inf else None


def count(value: float) -> str:
    """Format a count in decimal units.

    >>> count(2_200_000_000), count(5.4e13), count(124)
    ('2.2 B', '54 T', '124')
    """
    units = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return _in_units(value, units) or f"{value:.0f}"


def flops(value: float) -> str:
    """Format a number of floating-point operations.

    >>> flops(329e9), flops(0)
    ('329 GFLOP', '0 FLOP')
    """
    text = count(value).replace("B", "G")
    return f"{text}FLOP" if " " in text else f"{text} FLOP"


def percent(value: float | None, *, digits: int = 1, sign: bool = False) -> str:
    """Format a fraction in percent; the result is ``-`` for None.

    >>> percent(0.0814), percent(-0.02, sign=True), percent(0.25, digits=0), percent(None)
    ('8.1 %', '-2.0 %', '25 %', '-')
    """
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.{digits}f} %"


def ranges(labels: Iterable[str]) -> str:
    """Join labels to a list in which runs of consecutive numbers are ranges.

    >>> ranges(["wte", "h.0", "h.1", "h.2", "h.5", "ln_f"])
    'wte, h.0-2, h.5, ln_f'
    >>> ranges(["up.1.h.0", "up.1.h.1", "up.2.h.0", "up.2.h.1"])
    'up.1.h.0-1, up.2.h.0-1'
    """
    runs: list[list[list[str]]] = []
    for label in map(printable, labels):
        parts = _NUMBER.split(label)
        run = runs[-1] if runs else []
        position = _next_number(run[-1], parts) if run else None
        if position is not None and (len(run) == 1 or position == _next_number(run[-2], run[-1])):
            run.append(parts)
        else:
            runs.append([parts])
    texts = []
    for first, *others in runs:
        last = others[-1] if others else first
        texts.append("".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True)))
    return ", ".join(text for text, _ in groupby(texts))


def _next_number(before: Sequence[str], after: Sequence[str]) -> int | None:
    """Return the position of the only part in which two labels differ, if it is a number that is one higher in the second; else None."""
    differing = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if len(before) != len(after) or len(differing) != 1:
        return None
    a, b = before[differing[0]], after[differing[0]]
    return differing[0] if a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1 else None


def some(names: Iterable[str]) -> str:
    """Join up to three names to a list, with the number of further names.

    >>> some("abcde"), some("ab")
    ('a, b, c and 2 more', 'a, b')
    """
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def printable(text: str) -> str:
    """Return the text with control characters replaced by ``?``, as names may come from files of unknown origin."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Format a value in the first unit of which it is at least one; the result is empty if it is below all units."""
    return next((f"{_digits(value / scale)} {unit}" for scale, unit in units if abs(value) >= scale), "")


def _digits(value: float) -> str:
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return text if "e" not in text else f"{value:.0f}"


def plain_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    width: int = 100,
    indent: int = 2,
    markdown: bool = False,
) -> str:
    """Format a table. Columns named in ``left`` are aligned left and wrap; the others are aligned right.

    Args:
        head: the names of the columns; empty names for a table without a head.
        rows: the cells of each row.
        left: the names of the columns that are aligned left.
        width: the width of the table in characters, ``indent`` included.
        indent: blanks in front of each line.
        markdown: whether the table is one of Markdown.

    >>> print(plain_table(("name", "count"), [("a[1]", "1"), ("bc", "22")], left=("name",)))
      name  count
      a[1]      1
      bc       22
    """
    from rich.box import MARKDOWN
    from rich.console import Console  # slow to import, and not needed to format numbers
    from rich.table import Table

    edges: dict[str, Any] = {"box": MARKDOWN} if markdown else {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    table = Table(**edges, header_style="", show_header=any(head))
    for name in head:
        is_left = name in left
        table.add_column(name, justify="left" if is_left else "right", overflow="fold", no_wrap=not is_left)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    # brackets and colons in names are not markup
    console = Console(file=text, width=width - indent, color_system=None, force_terminal=False, highlight=False,
                      markup=False, emoji=False)  # fmt: skip
    console.print(table)
    return "\n".join(f"{' ' * indent}{line}".rstrip() for line in text.getvalue().splitlines()).strip("\n")
