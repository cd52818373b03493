"""The graph of a MODEL, kept in the cache directory where its description says all about it.

To trace a large model takes ten times as long as to search a plan for it, and a search is repeated with other pins and
clusters. Kept are graphs of families and of Hugging Face model types: what they depend on is in their name, which is a hash
of the description, the versions of torch and transformers, the model type's files and autopar's own sources. A factory or a
folder may have changed in any way and is traced each time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import UsageError
from autopar.plan.plan import PRECISIONS, Plan
from autopar.util.files import sources

if TYPE_CHECKING:
    from autopar.graph.graph import Graph


def is_factory(model: str) -> bool:
    """Whether MODEL is ``package.module:factory``, which decides its own sequence length.

    >>> is_factory("my.models:net"), is_factory("hf:gpt2")
    (True, False)
    """
    from autopar.models.specs import FAMILIES  # transformers' names are slow to import

    return model.partition(":")[0] not in ("hf", *FAMILIES)


def model_of(plan: Plan, file: Path) -> str:
    """The MODEL that a plan was made from, where its name says it.

    Raises:
        UsageError: the plan was made in Python for a model without such a name.
    """
    if ":" not in plan.model.name:
        raise UsageError(
            f"The plan's model '{plan.model.name}' is no MODEL of the command line",
            where=str(file),
            fix="Say which model with --model",
        )
    return plan.model.name


def sequence_of(plan: Plan, model: str) -> int | None:
    """The length of the sequences of a plan's model; None for a factory and for a model that does not take tokens."""
    tokens = plan.model.tokens_per_sample
    return None if is_factory(model) or tokens < 2 else tokens


MAX_FILES = 64
"""Graphs that are kept, those that were used last; one takes about a megabyte."""


def traced(
    model: str,
    *,
    sequence: int | None,
    precision: str,
    opaque: Sequence[str],
    global_batch_size: int,
    samples_apart: Callable[[Graph], object],
    cache_dir: Path,
    advance: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Graph:
    """The graph that plans of a MODEL are for.

    Args:
        samples_apart: see :func:`autopar.models.graph_for_plan.for_batch`.
        cache_dir: whose folder ``graphs`` keeps them.

    Raises:
        UsageError: an unknown precision; whatever else ``resolve_model`` refuses.
        TraceError: the model cannot be traced.
    """
    if precision not in PRECISIONS:
        raise UsageError.unknown("precision", precision, PRECISIONS)
    recipe, folder = PRECISIONS[precision], cache_dir / "graphs"
    files = [folder / _name(f"{own}, {sequence} tokens, {recipe.compute}, opaque {list(opaque)}")
             for own in (model, f"{model} at {global_batch_size}")] if _is_told(model) else []  # fmt: skip
    for file in files:
        if (kept := _load(file)) is not None:
            return kept
    from autopar.models.graph_for_plan import trace_model
    from autopar.models.resolve import resolve_model

    advance("tracing the model", 0, 0)
    found = resolve_model(model, sequence_length=sequence)
    graph = trace_model(found.model, found.example_inputs, recipe, name=found.name, opaque=opaque,
                        global_batch_size=global_batch_size, samples_apart=samples_apart)  # fmt: skip
    if files:
        _keep(graph, files[graph.exact])
    return graph


def _is_told(model: str) -> bool:
    """Whether a description says all about a model."""
    from autopar.models.specs import FAMILIES

    kind, _, rest = model.partition(":")
    return kind in FAMILIES or (kind == "hf" and not Path(rest.partition("?")[0]).exists())


def _name(described: str) -> str:
    parts = [described, sources(), version("torch"), *_of_transformers(described)]
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.pickle"


def _of_transformers(described: str) -> list[str]:
    """The version of transformers and the files of a model type, where it is one."""
    kind, _, rest = described.partition(":")
    if kind != "hf":
        return []
    with suppress(PackageNotFoundError):
        package = find_spec("transformers")
        root = Path(package.origin).parent if package is not None and package.origin else Path()
        name = rest.partition("?")[0].partition(",")[0].replace("-", "_")
        files = sorted((root / "models" / name).glob("*.py"))
        stats = [(file.name, file.stat()) for file in files]
        return [version("transformers"), *(f"{n} {s.st_size} {s.st_mtime_ns}" for n, s in stats)]
    return []


def _load(file: Path) -> Graph | None:
    """What is kept there; nothing where it is not, or cannot be read."""
    from autopar.graph.graph import Graph

    try:
        found = pickle.loads(file.read_bytes())
        os.utime(file)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
        return None
    return found if isinstance(found, Graph) else None


def _keep(graph: Graph, file: Path) -> None:
    """A cache that cannot be written is none."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".new", delete=False) as new:
            new.write(pickle.dumps(graph))
        Path(new.name).replace(file)
        kept = sorted(file.parent.glob("*.pickle"), key=lambda path: path.stat().st_mtime_ns)
        for old in kept[:-MAX_FILES]:
            old.unlink(missing_ok=True)
