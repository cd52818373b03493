"""The measured first steps of a run, compared with the prediction of its plan: data, verdict and file.

The runtime writes the log, which has one JSON event in each line, and ``autopar validate --from-run`` reads it. The prediction is that of
the plan, so that neither needs the cost model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.plan.prediction import Breakdown
from autopar.util import formatting
from autopar.util.files import read_text
from autopar.util.toml import MAY_BE_ZERO, Table

FILE_NAME = "autopar-run.jsonl"
FORMAT_VERSION = 1

COMPUTE, TENSOR, CONTEXT, DATA, PIPELINE, OPTIMIZER = CATEGORIES = (
    "compute",
    "tensor parallel",
    "context parallel",
    "data parallel",
    "pipeline",
    "optimizer",
)
"""The parts of a step that a rank can distinguish. ``compute`` is all that no other part is, recompute included. ``pipeline`` includes the
bubble, as a rank that waits for its neighbours cannot distinguish it from messages on the way."""

_FIELDS = {
    COMPUTE: ("compute_s", "recompute_s"),
    TENSOR: ("tensor_parallel_s",),
    CONTEXT: ("context_parallel_s",),
    DATA: ("data_parallel_s",),
    PIPELINE: ("pipeline_s", "bubble_s"),
    OPTIMIZER: ("optimizer_s", "offload_s"),
}
REST = "forward and backward"
"""All parts but the optimizer, for devices with several streams, whose work a clock of the host cannot distinguish."""

_REMEDIES = {
    REST: "`autopar profile all` measures this device and its links; torch.profiler shows what a step does",
    COMPUTE: "`autopar profile ops` measures the model's operators on this device",
    OPTIMIZER: "`autopar profile ops` measures this device; is the optimizer the plan's, and nothing else on the device?",
    PIPELINE: "`autopar profile links` measures this cluster's links; stages of unequal speed wait for each other as well",
}
_LINKS = "`autopar profile links` measures this cluster's links"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The predicted and the measured seconds of one part of a step."""

    name: str
    predicted_s: float = field(metadata=MAY_BE_ZERO)
    measured_s: float = field(metadata=MAY_BE_ZERO)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The measured first steps of a run, compared with the prediction of the plan.

    Attributes:
        model, cluster, mesh: those of the plan, for people.
        num_ranks: the number of ranks.
        num_steps: the number of steps of which medians are taken.
        predicted_s, interval_s: the step time of the plan and its interval.
        measured_s: the median step time of the slowest rank, with the optimizer and without the time between steps.
        between_s: the median time between steps of that rank (loading data, clipping, logging).
        parts: the parts of the step on the rank that computes longest.
        predicted_bytes, measured_bytes: the peak memory of tensors, without reserves, of the rank that exceeds its prediction the most;
            ``measured_bytes`` is None if the system does not report it.
        memory_kind: ``allocator`` (of CUDA) or ``resident`` (pages of the process on a CPU, with the weights of the original model).
        reserved_bytes: the peak of the memory that the allocator of that rank reserved, its gaps included; None if it has no allocator.
    """

    model: str
    cluster: str
    mesh: str
    num_ranks: int
    num_steps: int
    predicted_s: float
    interval_s: tuple[float, float] = field(metadata=MAY_BE_ZERO)
    measured_s: float = field(metadata=MAY_BE_ZERO)
    between_s: float = field(metadata=MAY_BE_ZERO)
    parts: tuple[Part, ...]
    predicted_bytes: int = field(metadata=MAY_BE_ZERO)
    measured_bytes: int | None = field(metadata=MAY_BE_ZERO)
    memory_kind: str
    reserved_bytes: int | None = field(default=None, metadata=MAY_BE_ZERO)

    @property
    def is_outside(self) -> bool:
        """Whether the measured step time is outside the predicted interval."""
        return not self.interval_s[0] <= self.measured_s <= self.interval_s[1]

    @property
    def worst(self) -> Part:
        """The part with the largest difference in seconds in the direction of the difference of the step."""
        sign = 1.0 if self.measured_s >= self.predicted_s else -1.0
        return max(self.parts, key=lambda part: sign * (part.measured_s - part.predicted_s))

    @property
    def is_over_memory(self) -> bool:
        """Whether the measured memory exceeds the prediction by more than the relative uncertainty of the step time.

        Resident memory includes more than tensors and is not compared.
        """
        if self.measured_bytes is None or self.memory_kind != "allocator":
            return False
        return self.measured_bytes > self.predicted_bytes * self.interval_s[1] / self.predicted_s

    def remedy(self, log: Path | None = None) -> str:
        """Return what the user can do about :attr:`worst`; ``log`` is the file of the run log."""
        table = f"`autopar validate --from-run {log.parent}` prints the table" if log is not None else ""
        table = table or "pass log_dir=DIR to parallelize and run `autopar validate --from-run DIR` for the table"
        return f"{_REMEDIES.get(self.worst.name, _LINKS)}; {table}"

    def warning(self, log: Path | None = None) -> str:
        """Return one sentence on what deviates and what the user can do; empty if nothing deviates."""
        texts = []
        if self.is_outside:
            worst, (low, high), time = self.worst, self.interval_s, formatting.seconds
            texts.append(
                f"steps take {time(self.measured_s)}, predicted {time(self.predicted_s)} ({time(low)} to {time(high)}); "
                f"most of it is {worst.name}: {time(worst.measured_s)}, predicted {time(worst.predicted_s)}; {self.remedy(log)}"
            )
        if self.is_over_memory:
            texts.append(
                f"peak memory is {self.measured_bytes} bytes, predicted {self.predicted_bytes}: "
                "pin a larger zero stage, recompute=full or a smaller micro_batch if it runs out"
            )
        return "; ".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The measurements of one rank: medians over the measured steps, and its peak memory.

    Attributes:
        rank: the rank.
        seconds: the seconds of each part of a step, by category.
        between_s: seconds between steps.
        measured_bytes: the measured peak memory; None if the system does not report it.
        predicted_bytes: the predicted peak memory of its pipeline rank.
        reserved_bytes: the peak of the memory that the allocator reserved; None without an allocator.
    """

    rank: int
    seconds: Mapping[str, float]
    between_s: float
    measured_bytes: int | None
    predicted_bytes: int
    reserved_bytes: int | None = None

    @property
    def total_s(self) -> float:
        """The seconds of the step, optimizer included."""
        return sum(self.seconds.values())


def predicted_parts(breakdown: Breakdown) -> dict[str, float]:
    """Return the predicted seconds by category."""
    return {name: sum(getattr(breakdown, field) for field in fields) for name, fields in _FIELDS.items()}


def predicted_bytes(plan: Plan, rank: int) -> int:
    """Return the predicted peak memory of a rank's tensors in bytes, without reserves."""
    return max((m.total - m.reserved for m in plan.memory_of(rank)), default=0)


def step_of(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each category over steps, scaled so that the categories add up to the median step."""
    medians = {name: median(step.get(name, 0.0) for step in seconds) for name in CATEGORIES}
    whole, parts = median(sum(step.values()) for step in seconds), sum(medians.values())
    return {name: value * whole / parts if parts else 0.0 for name, value in medians.items()}


def record_of(
    plan: Plan, ranks: Sequence[RankTimes], *, num_steps: int, memory_kind: str, is_coarse: bool = False
) -> RunRecord:
    """Return the record of all ranks: the step of the slowest rank, and the parts of the rank that computes longest.

    Args:
        is_coarse: whether only the optimizer was distinguished from all other parts, which are then in ``compute``.
    """
    slowest = max(ranks, key=lambda rank: rank.total_s)
    busiest = max(ranks, key=lambda rank: rank.seconds[COMPUTE])
    measured = [rank for rank in ranks if rank.measured_bytes is not None]
    fullest = max(measured, key=lambda r: (r.measured_bytes or 0) - r.predicted_bytes) if measured else ranks[0]
    predicted, seconds = predicted_parts(plan.predicted.breakdown), dict(busiest.seconds)
    names: tuple[str, ...] = CATEGORIES
    if is_coarse:
        for values in (predicted, seconds):
            values[REST] = sum(values[name] for name in CATEGORIES if name != OPTIMIZER)
        names = (REST, OPTIMIZER)
    return RunRecord(
        model=plan.model.name,
        cluster=plan.cluster,
        mesh=str(plan.mesh),
        num_ranks=len(ranks),
        num_steps=num_steps,
        predicted_s=plan.predicted.step_time_s,
        interval_s=plan.predicted.step_time_interval_s,
        measured_s=slowest.total_s,
        between_s=slowest.between_s,
        parts=tuple(Part(name=name, predicted_s=predicted[name], measured_s=seconds[name]) for name in names),
        predicted_bytes=fullest.predicted_bytes,
        measured_bytes=fullest.measured_bytes,
        reserved_bytes=fullest.reserved_bytes,
        memory_kind=memory_kind,
    )


def write_log(path: Path, record: RunRecord, ranks: Iterable[RankTimes], steps: Iterable[Mapping[str, Any]]) -> None:
    """Append a run to the log: an event for each measured step of rank 0, one for each rank, and the comparison."""
    events: list[dict[str, Any]] = [{"event": "step", **step} for step in steps]
    events += [{"event": "rank", **asdict(rank)} for rank in ranks]
    events.append({"event": "comparison", "version": FORMAT_VERSION, **asdict(record)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(event, allow_nan=False) + "\n" for event in events))


def read_log(folder: Path) -> RunRecord:
    """Return the last comparison in a log.

    Args:
        folder: the ``log_dir`` of the run, or the file in it.

    Raises:
        UsageError: there is no comparison, or the file is not a log; the error names file and line.
    """
    path = folder / FILE_NAME if folder.is_dir() else folder
    if not path.is_file():
        raise UsageError(
            f"No {FILE_NAME} in {folder}",
            fix="Run with parallelize(log_dir=...), which writes it after the first steps",
        )
    record: RunRecord | None = None
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            event = json.loads(line)
            if event["event"] == "comparison":
                record = _record(Table(event, file=f"event {number}"))
        except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
            raise UsageError(
                "This line is not an event that autopar wrote",
                where=f"{path}:{number}",
                got=f"{type(error).__name__}: {error}",
                fix="Delete it (a run that was killed may have left it), and the lines of its run before it",
            ) from error
    if record is None:
        raise UsageError(
            "The log has no comparison with the prediction yet",
            where=str(path),
            fix="Run more steps, and read it again",
        )
    return record


def _record(event: Table) -> RunRecord:
    event.has("event")
    version = event.integer("version")
    if version != FORMAT_VERSION:
        raise ValueError(f"version {version}, this autopar reads {FORMAT_VERSION}")
    record = event.record(RunRecord)
    if not record.parts:
        raise event.wrong("parts", "the parts of a step", "none")
    return record
