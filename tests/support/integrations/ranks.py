"""What the ranks of the integrations' tests have in common: data, names of plans, a parallel model under torchrun."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import Dataset

from autopar import api
from autopar.graph.graph import Graph
from autopar.plan.plan import Plan, PrecisionName
from autopar.runtime.parallel_model import ParallelModel
from tests.support.distributed.layouts import LAYOUTS
from tests.support.distributed.plans import make_plan, micro_batch_size
from tests.support.distributed.subjects import HfSubject
from tests.support.parallel import on_rank
from tests.support.scripts import as_under_torchrun

SUBJECT = HfSubject("gpt2")
BATCH, SAMPLES = 8, 27
"""The last batch of an epoch has 3 samples."""

PLANS = {"tp2": "tp2", "pp2": "pp2 GPipe", "ZeRO 3": "dp2 ZeRO 3 recomputed"}
ACCUMULATED = [("pp2", 2), ("ZeRO 3", 2), ("pp2", 1)]
"""Of how many batches loops add up the gradients: where ranks share samples and where they have some of their own; of one too
where they go on under another plan."""


def plan_of(name: str, graph: Graph, **changes: Any) -> Plan:
    mesh, options = LAYOUTS[PLANS[name]]
    size = micro_batch_size(mesh, BATCH)
    return make_plan(graph, mesh, global_batch_size=BATCH, micro_batch_size=size, **{**options, **changes})


@cache
def graph_in(precision: PrecisionName) -> Graph:
    return api.trace(SUBJECT.build(), example_inputs=SUBJECT.make_batch(2, seed=0), precision=precision, name="gpt2")


class Texts(Dataset[dict[str, Tensor]]):
    """Samples of the subject's, of uneven length."""

    def __init__(self, length: int = SAMPLES, *, seed: int = 11) -> None:
        self.batch = SUBJECT.make_batch(length, seed=seed)

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: value[i] for name, value in self.batch.items()}


def forget() -> None:
    """Accelerate keeps what it knows of a job for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def as_parallel(plan: Plan, graph: Graph) -> Iterator[ParallelModel]:
    """The subject's, of one of torchrun's ranks."""
    forget()
    model = SUBJECT.build()  # the Trainer looks at it
    with as_under_torchrun():
        yield on_rank(model, plan, graph)
    forget()
