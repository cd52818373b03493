"""Measured runs: each row of a CSV file is one run, and the header names its columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from autopar.errors import AutoparError, UsageError, closest
from autopar.models.transformer import ATTENTIONS, FAMILIES
from autopar.plan.plan import RECOMPUTES
from autopar.util.files import read_text

PRECISIONS = ("fp32", "fp16", "bf16", "bf16_fp32_grad_accum", "bf16_true", "fp8")
COUNTS = (
    "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq", "devices", "devices_per_node", "tp", "pp",
    "virtual_stages", "dp", "cp", "micro_batch", "global_batch",
)  # fmt: skip
CHOICES = {"family": FAMILIES, "attention": ATTENTIONS, "precision": PRECISIONS}
MAY_BE_EMPTY = {"zero": ("0", "1", "2", "3"), "sequence_parallel": ("0", "1"), "recompute": RECOMPUTES}
MEASURED = ("step_time_s", "peak_memory_gib")
TEXTS = ("name", "device", "source")
MEMORY_KINDS = ("allocator", "nvidia-smi")
COLUMNS = ("name", *COUNTS, *CHOICES, *MAY_BE_EMPTY, "device", *MEASURED, "memory_kind", "source")
"""The columns of a run; other columns are ignored."""
MOST = 10**9
"""Largest value of a count: a larger one lacks its unit or a separator, and no tensor has such a size."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run; ``docs/evidence/accuracy.md`` describes the columns.

    Attributes:
        file, line: its place; the header is line 1.
        zero, sequence_parallel, recompute: None where the source does not say.
        step_time_s, peak_memory_bytes: None if unknown.
        memory_kind: how memory was measured: ``allocator``, ``nvidia-smi`` or empty.
    """

    line: int
    name: str
    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    device: str
    devices: int
    devices_per_node: int
    tp: int
    pp: int
    virtual_stages: int
    dp: int
    cp: int
    zero: int | None
    micro_batch: int
    global_batch: int
    recompute: str | None
    sequence_parallel: bool | None
    attention: str
    precision: str
    step_time_s: float | None
    peak_memory_bytes: float | None
    memory_kind: str
    source: str
    file: str = "runs"

    @property
    def place(self) -> str:
        """File and row, for errors."""
        return f"{self.file}, row {self.line}"

    @property
    def release(self) -> str:
        """The source without its address: software and release."""
        return self.source.split(";")[0].strip()

    @property
    def publisher(self) -> str:
        """The source without its release; runs of one publisher are left out of a fit together."""
        return re.sub(r"\s*\([^)]*\)\s*$", "", self.release)

    @property
    def model(self) -> tuple[object, ...]:
        """Model, batch and devices: plans of runs with equal ones can be compared."""
        return (
            self.publisher, self.family, self.layers, self.hidden, self.ffn, self.heads, self.kv_heads, self.seq,
            self.device, self.devices, self.global_batch, self.precision,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A row that cannot be predicted, and why."""

    file: str
    line: int
    name: str
    release: str
    error: AutoparError

    @classmethod
    def of(cls, run: Run, error: AutoparError) -> FailedRow:
        """Return the failed row of a run that was read."""
        return cls(file=run.file, line=run.line, name=run.name, release=run.release, error=error)


def read_rows(path: Path) -> tuple[Run | FailedRow, ...]:
    """Return the rows of a file; rows with invalid or inconsistent cells are failed rows.

    Raises:
        UsageError: the file cannot be read, or a column is missing or unknown.
    """
    text = read_text(path)
    try:
        return _rows(text, path)
    except csv.Error as error:
        raise UsageError(
            "The file is not comma-separated values",
            where=str(path),
            got=str(error),
            fix="Close each double quote, and write one inside of a text twice",
        ) from error


def _rows(text: str, path: Path) -> tuple[Run | FailedRow, ...]:
    """Return the rows of a text."""
    reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
    header = [name.strip() for name in reader.fieldnames or ()]
    _check_form(header, path)
    reader.fieldnames = header
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        others = [name for name in header if name not in COLUMNS]
        raise UsageError.missing(
            f"column {', '.join(missing)}",
            where=f"{path}, row 1",
            fix=f"Add it{f' (is {others[0]} meant as one?)' if others else ''}: "
            "a cell may be empty where docs/evidence/accuracy.md says so",
        )
    rows = tuple(_run_or_fault(row, path, reader.line_num) for row in reader)
    if not rows:
        raise UsageError("The file has a header but no run", where=str(path), fix="Add a row for each run")
    return rows


def _run_or_fault(cells: Mapping[str, str | None], path: Path, line: int) -> Run | FailedRow:
    """Return a run, or a failed row."""
    try:
        return _run(cells, path, line)
    except UsageError as error:
        name, source = ((cells.get(key) or "").strip() for key in ("name", "source"))
        return FailedRow(file=str(path), line=line, name=name, release=source.split(";")[0].strip(), error=error)


def _check_form(header: Sequence[str], path: Path) -> None:
    """Check that the first row names columns, separated by commas, each once.

    Raises:
        UsageError: it does not.
    """
    if not any(header):
        raise UsageError("The first row is empty", where=f"{path}, row 1", fix="Write the names of the columns there")
    other = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
    if other is not None:
        raise UsageError(
            f"The cells of a row are separated by {other!r}",
            where=f"{path}, row 1",
            fix="Write the table as comma-separated values",
        )
    repeated = next((name for name in header if name in COLUMNS and header.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"The column {repeated} is there twice", where=f"{path}, row 1", fix="Leave one of them out")


class _Row:
    """The cells of one row, read with errors that name them."""

    def __init__(self, row: Mapping[str, str | None], path: Path, line: int) -> None:
        self.cells = {key: (row.get(key) or "").strip() for key in COLUMNS}
        self.path, self.line = path, line
        beyond: object = row.get(None)  # type: ignore[call-overload]
        if beyond:
            raise UsageError(
                f"The row has more cells than there are columns: {beyond}",
                where=f"{path}, row {line}",
                fix="Write a text that has commas between double quotes",
            )

    def fault(self, column: str, expected: str, fix: str = "") -> UsageError:
        """Return an error about a cell."""
        place = f"{self.path}, row {self.line}, column {column}"
        return UsageError(
            "The cell has a wrong value",
            where=place,
            expected=expected,
            got=repr(self.cells[column]),
            fix=fix or "Change the cell",
        )

    def count(self, column: str) -> int:
        """Return a whole number from 1."""
        if not re.fullmatch(r"[1-9]\d*(\.0*)?", self.cells[column]):
            raise self.fault(column, "a whole number from 1")
        digits = self.cells[column].partition(".")[0]
        if len(digits) > len(str(MOST)) or int(digits) > MOST:
            raise self.fault(column, f"at most {MOST:,}")
        return int(digits)

    def choice(self, column: str, known: tuple[str, ...], *, may_be_empty: bool = False) -> str:
        """Return one of the known texts."""
        cell = self.cells[column]
        if cell not in known and (cell or not may_be_empty):
            expected = f"{'nothing or ' if may_be_empty else ''}one of {', '.join(known)}"
            raise self.fault(column, expected, closest(cell, known))
        return cell

    def measured(self, column: str) -> float | None:
        """Return a number above zero, or None if the cell is empty."""
        if not self.cells[column]:
            return None
        try:
            value = float(self.cells[column])
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise self.fault(column, "nothing or a number above zero")
        return value


def _run(cells: Mapping[str, str | None], path: Path, line: int) -> Run:
    """Return the run of a row.

    Raises:
        UsageError: a cell is invalid or contradicts others.
    """
    row = _Row(cells, path, line)
    counts = {column: row.count(column) for column in COUNTS}
    chosen = {column: row.choice(column, known) for column, known in CHOICES.items()}
    stated = {column: row.choice(column, known, may_be_empty=True) for column, known in MAY_BE_EMPTY.items()}
    time_s, memory = (row.measured(column) for column in MEASURED)
    if time_s is None and memory is None:
        raise row.fault("step_time_s", "a measured time or memory", "Give one of the two")
    memory_kind = row.choice("memory_kind", MEMORY_KINDS, may_be_empty=True)
    run = Run(
        file=str(path),
        line=line,
        memory_kind=memory_kind,
        zero=int(stated["zero"]) if stated["zero"] else None,
        recompute=stated["recompute"] or None,
        sequence_parallel=stated["sequence_parallel"] == "1" if stated["sequence_parallel"] else None,
        step_time_s=time_s,
        peak_memory_bytes=None if memory is None else memory * GIB,
        **cast("dict[str, Any]", {column: row.cells[column] for column in TEXTS} | counts | chosen),
    )
    _check(run, row)
    return run


def _check(run: Run, row: _Row) -> None:
    """Check the numbers of a row against each other."""
    if run.tp * run.pp * run.cp * run.dp != run.devices:
        raise row.fault("devices", f"tp * pp * cp * dp = {run.tp * run.pp * run.cp * run.dp}")
    if run.devices % min(run.devices, run.devices_per_node):
        raise row.fault("devices_per_node", f"a divisor of the {run.devices} devices, as nodes are full")
    if run.virtual_stages > 1 and run.pp == 1:
        raise row.fault("virtual_stages", "1 without a pipeline (pp=1)", "Write 1, or correct pp")
    if run.hidden % run.heads:
        raise row.fault("heads", f"a divisor of the hidden size {run.hidden}")
    if run.heads % run.kv_heads:
        raise row.fault("kv_heads", f"a divisor of the {run.heads} heads")
    for column, size in (("tp", run.heads), ("tp", run.ffn), ("cp", run.seq)):
        if size % getattr(run, column):
            raise row.fault(column, f"a divisor of heads, ffn or sequence {size}")
    if run.global_batch % (run.dp * run.micro_batch):
        raise row.fault("global_batch", f"a multiple of dp * micro_batch = {run.dp * run.micro_batch}")
    if run.layers + 2 < run.pp * run.virtual_stages:
        stages = run.pp * run.virtual_stages
        raise row.fault("layers", f"a layer, the embedding or the head for each of {stages} stages")
