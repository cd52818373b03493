"""Published layouts as problems: our plan beside theirs under the same cost model. Data in ``search/studies/*.toml``.

A published layout is a set of pins; what its source leaves open is searched, in the published plan's favour.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autopar.errors import InfeasibleError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import SCALES, scaled
from autopar.plan.plan import Plan
from autopar.util import files as resources
from autopar.util.toml import Table

if TYPE_CHECKING:
    from autopar.graph.graph import Graph
    from autopar.models.transformer import Sizes
    from autopar.planner.task import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A published run.

    Attributes:
        title, source, measured: for people: what it is, where it stands, what the source measured.
        unsure: what the source does not say, and what was taken instead.
        scale: factors of numbers of the cluster (``autopar.hardware.describe``), for hardware without a profile of its own.
        pins: the published layout.
        model: MODEL of the command line, or sizes with a number of layers (``autopar.models.transformer``).
    """

    name: str
    title: str
    source: str
    measured: str
    unsure: tuple[str, ...]
    cluster: str
    scale: tuple[tuple[str, float], ...]
    global_batch_size: int
    sequence: int
    precision: str
    pins: tuple[str, ...]
    model: str | tuple[Sizes, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """Both plans; ``published`` is None where the layout does not fit by the cost model, ``reason`` says why.

    ``trace_s``: seconds for building and tracing the model, which the plans' ``wall_time_s`` leave out.
    """

    study: Study
    ours: Plan
    published: Plan | None
    reason: str
    trace_s: float

    @property
    def ratio(self) -> float | None:
        """Step time of the published layout over ours: above one, ours is faster."""
        if self.published is None:
            return None
        return self.published.predicted.step_time_s / self.ours.predicted.step_time_s


def study_files() -> dict[str, Path]:
    """The shipped studies by name."""
    return resources.files("search/studies")


def load_study(name: str) -> Study:
    """A shipped study by name, or one from a TOML file.

    Raises:
        UsageError: unknown name, malformed file (file, line, key).
    """
    shipped = study_files()
    if not name.endswith(".toml") and name not in shipped:
        raise UsageError.unknown("study", name, shipped, fix="or give the path of a .toml file")
    path = Path(name) if name.endswith(".toml") else shipped[name]
    table = Table.load(path)
    sequence, precision = table.integer("sequence"), table.text("precision")
    model, scale = table.table("model"), []
    if table.has("scale"):
        factors = table.table("scale")
        for key in factors.names():
            if key not in SCALES:
                raise UsageError.unknown("number of a cluster", key, SCALES, where=factors.place(key))
            scale.append((key, factors.number(key)))
    study = Study(
        name=path.stem,
        title=table.text("title"),
        source=table.text("source"),
        measured=table.text("measured", ""),
        unsure=_texts(table, "unsure") if table.has("unsure") else (),
        cluster=table.text("cluster"),
        scale=tuple(scale),
        global_batch_size=table.integer("global_batch"),
        sequence=sequence,
        precision=precision,
        pins=_texts(table, "pins"),
        model=model.text("spec") if model.has("spec") else _sizes(model, sequence),
    )
    model.finish()
    table.finish()
    return study


def _sizes(table: Table, sequence: int) -> tuple[Sizes, int]:
    from autopar.models.transformer import ATTENTIONS, FAMILIES, Sizes

    family, attention, heads = table.text("family"), table.text("attention"), table.integer("heads")
    for key, value, known in (("family", family, FAMILIES), ("attention", attention, ATTENTIONS)):
        if value not in known:
            raise UsageError.unknown(key, value, known, where=table.place(key))
    sizes = Sizes(
        family=family,
        hidden=table.integer("hidden"),
        ffn=table.integer("ffn"),
        heads=heads,
        kv_heads=table.integer("kv_heads", heads),
        vocabulary=table.integer("vocabulary"),
        sequence=sequence,
        attention=attention,
        dtype="float32",
    )
    return sizes, table.integer("layers")


def _texts(table: Table, key: str) -> tuple[str, ...]:
    value = table.raw(key)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise table.wrong(key, "a list of texts", repr(value))
    return tuple(value)


def cluster_of(study: Study) -> Cluster:
    """The study's cluster."""
    return scaled(Cluster.parse(study.cluster), dict(study.scale))


def graph_of(study: Study) -> Graph:
    """The study's model, traced on meta."""
    from autopar import api

    inputs: Any
    if isinstance(study.model, str):
        from autopar.models.resolve import resolve_model

        source = resolve_model(study.model, sequence_length=study.sequence)
        model, inputs = source.model, source.example_inputs
    else:
        from autopar.models.transformer import build

        model, inputs = build(*study.model)
    return api.trace(
        model, example_inputs=inputs, precision=cast("Any", study.precision), name=study.name,
        global_batch_size=study.global_batch_size,
    )  # fmt: skip


def run_study(
    study: Study, *, space: str = "default", progress: Progress | None = None, workers: int | None = None
) -> StudyResult:
    """Our plan for a study, and the best one that its published layout leaves; ``workers`` as for a search.

    Raises:
        InfeasibleError: nothing fits the cluster.
    """
    from autopar import api

    start = time.monotonic()
    if progress is not None:
        progress("tracing the model", 0, 0)
    graph, cluster = graph_of(study), cluster_of(study)
    trace_s = time.monotonic() - start

    def best(pins: tuple[str, ...]) -> Plan:
        return api.search(
            graph,
            cluster=cluster,
            global_batch_size=study.global_batch_size,
            pins=pins,
            precision=cast("Any", study.precision),
            space=space,
            progress=progress,
            workers=workers,
        )

    ours, published, reason = best(()), None, ""
    try:
        published = best(study.pins)
    except InfeasibleError as error:
        reason = str(error)
    return StudyResult(study=study, ours=ours, published=published, reason=reason, trace_s=trace_s)
