"""Which operators a search can ask the time of, and where those of a plan came from."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from autopar.cost.operators.measured import Measured, Recorder, Source, measurement_note
from autopar.cost.operators.roofline import op_time
from autopar.cost.operators.work import operand_specs
from autopar.graph.ir import Op
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import layout_key_of

if TYPE_CHECKING:
    from autopar.planner.evaluate.evaluator import Evaluation
    from autopar.planner.evaluate.families import Evaluator
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
    sizes = [(size, c.mesh) for c in planner.pool for size in c.shares or (c.micro_batch_size,)]
    splits = dict.fromkeys(layout_key_of(size, mesh) for size, mesh in sizes)
    for done, split in enumerate(splits):
        if progress is not None:
            progress("laying out", done, len(splits))
        layouts.unsplit(split.micro_batch_size, split.ep_data)
        layouts.quickest_s(split)
    return tuple(recorder.calls.values())


def measured_note(evaluator: Evaluator, best: Evaluation) -> tuple[str, ...]:
    """How many operators of a plan have a measured time; nothing where the device has none at all."""
    model, layouts, option = evaluator.model, evaluator.layouts, best.option
    measured = model.measured
    if not isinstance(measured, Measured):
        return ()
    graph = layouts.local_graph(option)
    counts: Counter[Source] = Counter()

    def count(op: Op, times: int) -> None:
        operands = operand_specs(op, graph.spec)
        roofline = op_time(op, operands, model.device, quantized=model.quantized)
        if roofline.forward_s + roofline.backward_s > 0:
            counts[measured.find(op, operands, roofline)[1]] += times

    for op in graph.prelude:
        count(op, 1)
    for block, members in zip(graph.blocks, layouts.compact.members, strict=True):
        for op in graph.block_ops(block):
            count(op, len(members))
    return (measurement_note(counts),)
