"""Which operators a search can ask the time of: what ``autopar profile ops`` measures."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.operators.measured import Recorder
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import layout_key_of
from autopar.planner.outcome import Progress
from autopar.planner.planner import Planner


def operator_calls(planner: Planner, *, progress: Progress | None = None) -> tuple[str, ...]:
    """Every call at every local shape that the planner can price, each once, as :func:`autopar.cost.operators.measured.encode` writes it.

    The planner lays out each micro-batch size with each degree of ``cp``, ``tp`` and expert spreading of its candidates,
    as it does in a search, while a recorder stands where measured times would: all strategies of all operators on ``tp``,
    those of the best typing on ``cp``.

    Args:
        planner: of a task; its cost model must not be used for anything else afterwards.
    """
    recorder = Recorder()
    planner.model.measured = recorder
    task = planner.task  # layouts of its own: those that shares of samples were chosen by are known already
    layouts = Layouts(
        task.graph, planner.model, global_batch_size=task.global_batch_size, pins=task.pins, space=task.space
    )
    keys = dict.fromkeys(
        replace(layout_key_of(c), micro_batch_size=size)
        for c in planner.pool
        for size in c.shares or (c.micro_batch_size,)
    )
    for done, key in enumerate(keys):
        if progress is not None:
            progress("laying out", done, len(keys))
        layouts.unsplit(key.unsplit)
        layouts.quickest_s(key)
    return tuple(recorder.calls.values())
