"""Measured runs: each row of a CSV file is one run, and the header names its columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from autopar.errors import AutoparError, UsageError
from autopar.models.transformer import Attention, Family
from autopar.plan.plan import Recompute
from autopar.util.files import read_text
from autopar.util.toml import Key, Table

PrecisionColumn = Literal["fp32", "fp16", "bf16", "bf16_fp32_grad_accum", "bf16_true", "fp8"]
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
    family: Family
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
    zero: Literal[0, 1, 2, 3] | None = None
    micro_batch: int
    global_batch: int
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    attention: Attention
    precision: PrecisionColumn
    step_time_s: float | None = None
    peak_memory_bytes: float | None = field(default=None, metadata={"key": "peak_memory_gib"})
    memory_kind: Literal["", "allocator", "nvidia-smi"] = ""
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


TEXTS = ("name", "device", "source")
COLUMNS = tuple(f.metadata.get("key", f.name) for f in fields(Run) if f.name not in ("file", "line"))
"""The columns of a run; other columns are ignored."""


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


class _Row(Table):
    """The cells of one row that are not empty, read with errors that name row and column."""

    def __init__(self, cells: Mapping[str, str | None], path: Path, line: int) -> None:
        beyond: object = cells.get(None)  # type: ignore[call-overload]
        if beyond:
            raise UsageError(
                f"The row has more cells than there are columns: {beyond}",
                where=f"{path}, row {line}",
                fix="Write a text that has commas between double quotes",
            )
        texts = {key: (cells.get(key) or "").strip() for key in COLUMNS}
        values = {key: text if key in TEXTS else _typed(key, text) for key, text in texts.items()}
        filled = {key: value for key, value in values.items() if value != "" or key in TEXTS}
        super().__init__(filled, file=f"{path}, row {line}")

    def place(self, key: Key | None) -> str:
        """Return the row and the column."""
        return self._file if key is None else f"{self._file}, column {key}"


def _typed(column: str, text: str) -> object:
    """Return a number if the text is one, or what a flag says."""
    if column == "sequence_parallel":
        return {"0": False, "1": True}.get(text, text)
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _run(cells: Mapping[str, str | None], path: Path, line: int) -> Run:
    """Return the run of a row.

    Raises:
        UsageError: a cell is invalid or contradicts others.
    """
    row = _Row(cells, path, line)
    run = row.record(Run, file=str(path), line=line)
    if run.step_time_s is None and run.peak_memory_bytes is None:
        raise row.wrong("step_time_s", "a measured time or memory", "''")
    _check(run, row)
    return run if run.peak_memory_bytes is None else replace(run, peak_memory_bytes=run.peak_memory_bytes * GIB)


def _check(run: Run, row: _Row) -> None:
    """Check the numbers of a row against each other."""
    for column in COLUMNS:
        if isinstance(value := getattr(run, column, None), int) and value > MOST:
            raise row.wrong(column, f"at most {MOST:,}", value)
    ranks, samples, stages = run.tp * run.pp * run.cp * run.dp, run.dp * run.micro_batch, run.pp * run.virtual_stages
    faults: tuple[tuple[str, object, str], ...] = (
        ("devices", ranks != run.devices, f"tp * pp * cp * dp = {ranks}"),
        (
            "devices_per_node",
            run.devices % min(run.devices, run.devices_per_node),
            f"a divisor of the {run.devices} devices, as nodes are full",
        ),
        ("virtual_stages", run.virtual_stages > 1 and run.pp == 1, "1 without a pipeline (pp=1)"),
        ("heads", run.hidden % run.heads, f"a divisor of the hidden size {run.hidden}"),
        ("kv_heads", run.heads % run.kv_heads, f"a divisor of the {run.heads} heads"),
        ("tp", run.heads % run.tp, f"a divisor of the {run.heads} heads"),
        ("tp", run.ffn % run.tp, f"a divisor of ffn {run.ffn}"),
        ("cp", run.seq % run.cp, f"a divisor of the sequence {run.seq}"),
        ("global_batch", run.global_batch % samples, f"a multiple of dp * micro_batch = {samples}"),
        ("layers", run.layers + 2 < stages, f"a layer, the embedding or the head for each of {stages} stages"),
    )
    for column, is_wrong, expected in faults:
        if is_wrong:
            raise row.wrong(column, expected, row.raw(column))
