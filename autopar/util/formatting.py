"""Numbers, sizes, lists of labels and tables as people read them in plain text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

_NUMBER = re.compile(r"(\d+)")


def seconds(value_s: float) -> str:
    """Three significant digits in a fitting unit.

    >>> seconds(0.45), seconds(12.3), seconds(0.00021), seconds(0)
    ('450 ms', '12.3 s', '210 us', '0 s')
    """
    if value_s == 0:
        return "0 s"
    return _in_units(value_s, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))) or f"{_digits(value_s / 1e-9)} ns"


def num_bytes(value: float) -> str:
    """Binary units.

    >>> num_bytes(31 * 2**30), num_bytes(1536), num_bytes(12)
    ('31 GiB', '1.5 KiB', '12 B')
    """
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return _in_units(value, units) or f"{value:.0f} B"


def count(value: float) -> str:
    """Decimal units.

    >>> count(2_200_000_000), count(5.4e13), count(124)
    ('2.2 B', '54 T', '124')
    """
    units = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return _in_units(value, units) or f"{value:.0f}"


def flops(value: float) -> str:
    """Floating point operations.

    >>> flops(329e9), flops(0)
    ('329 GFLOP', '0 FLOP')
    """
    text = count(value).replace("B", "G")
    return f"{text}FLOP" if " " in text else f"{text} FLOP"


def share(part: float, whole: float) -> str:
    """A part in percent; ``-`` where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def percent(value: float | None, *, digits: int = 1, sign: bool = False) -> str:
    """A fraction in percent; a dash for none.

    >>> percent(0.0814), percent(-0.02, sign=True), percent(0.25, digits=0), percent(None)
    ('8.1 %', '-2.0 %', '25 %', '-')
    """
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.{digits}f} %"


def ranges(labels: Iterable[str]) -> str:
    """Labels with runs of numbers joined.

    >>> ranges(["wte", "h.0", "h.1", "h.2", "h.5", "ln_f"])
    'wte, h.0-2, h.5, ln_f'
    >>> ranges(["up.1.h.0", "up.1.h.1", "up.2.h.0", "up.2.h.1"])
    'up.1.h.0-1, up.2.h.0-1'
    """
    runs: list[list[list[str]]] = []
    for label in map(printable, labels):
        parts = _NUMBER.split(label)
        run = runs[-1] if runs else []
        place = _next_number(run[-1], parts) if run else None
        if place is not None and (len(run) == 1 or place == _next_number(run[-2], run[-1])):
            run.append(parts)
        else:
            runs.append([parts])
    texts = []
    for first, *others in runs:
        last = others[-1] if others else first
        texts.append("".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True)))
    return ", ".join(text for text, _ in groupby(texts))


def _next_number(before: Sequence[str], after: Sequence[str]) -> int | None:
    """The only place in which two labels differ, where the second has the number that follows that of the first."""
    differing = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if len(before) != len(after) or len(differing) != 1:
        return None
    a, b = before[differing[0]], after[differing[0]]
    return differing[0] if a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1 else None


def some(names: Iterable[str]) -> str:
    """Up to three of them, and how many there are besides.

    >>> some("abcde"), some("ab")
    ('a, b, c and 2 more', 'a, b')
    """
    every = list(names)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def printable(text: str) -> str:
    """The text with control characters shown as ``?``: names come from files that anyone may have written."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    """In the first unit that it is at least one of; empty where it is less than all of them."""
    return next((f"{_digits(value / scale)} {unit}" for scale, unit in units if abs(value) >= scale), "")


def _digits(value: float) -> str:
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return text if "e" not in text else f"{value:.0f}"


def plain_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = (), width: int = 100, indent: int = 2
) -> str:
    """Columns two blanks apart; those named in ``left`` start at the left and fold, others stand at the right.

    >>> print(plain_table(("name", "count"), [("a[1]", "1"), ("bc", "22")], left=("name",)))
      name  count
      a[1]      1
      bc       22
    """
    from rich.console import Console  # not for numbers alone, which programs print too
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", show_header=any(head))
    for name in head:
        is_left = name in left
        table.add_column(name, justify="left" if is_left else "right", overflow="fold", no_wrap=not is_left)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    # names may hold brackets and colons: nothing in them is markup
    console = Console(file=text, width=width - indent, color_system=None, force_terminal=False, highlight=False,
                      markup=False, emoji=False)  # fmt: skip
    console.print(table)
    return "\n".join(f"{' ' * indent}{line}".rstrip() for line in text.getvalue().splitlines())
