"""Tables of plain text: no colours, no lines, no trailing blanks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def plain_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = (), width: int = 100, indent: int = 2
) -> str:
    """Columns two blanks apart; those named in ``left`` start at the left and fold, others stand at the right.

    >>> print(plain_table(("name", "count"), [("a[1]", "1"), ("bc", "22")], left=("name",)))
      name  count
      a[1]      1
      bc       22
    """
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
