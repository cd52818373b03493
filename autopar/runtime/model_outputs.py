"""The outputs of one forward pass: values that stages have stored, joined, and values that are computed from these.

On one device any output may become part of a loss. Here only the gradients of the plan's loss are summed over ranks. So a request for the
gradient of another output is refused, as it would silently be left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from autopar.errors import UsageError
from autopar.graph.elements import Leaf, Outputs, ancestors
from autopar.graph.graph import Input, Op, Ref
from autopar.graph.interpreter import run
from autopar.lower.emit import takes_device
from autopar.lower.program import Program
from autopar.plan.plan import Plan
from autopar.rules.local_calls import layout_of
from autopar.runtime.checkpoint.contents import WholeTensors, model_parts
from autopar.runtime.joined_values import Join, Samples, Tap, rebuilt
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.step.local_batch import num_samples
from autopar.runtime.step.other_runs import BatchSplit
from autopar.runtime.step.stage import StageModule
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import Peers, World
from autopar.tracing.batch import named_inputs


def without_gradient(value: Tensor, name: str) -> Tensor:
    """Return the value, which claims to require a gradient as on one device; a ``backward()`` through it raises an error that names it."""
    start = torch.zeros((), device=value.device, requires_grad=True)
    found: Tensor = _WithoutGradient.apply(start, value, name)  # type: ignore[no-untyped-call]
    return found


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise UsageError(
            f"The output {ctx.name} of par(**batch) was made a part of a loss, but only the plan's loss has a gradient",
            fix="Add it up in the model's forward, as its entry loss, or give autopar.parallelize(model, loss_fn=lambda output, batch: ...)",
        )


class NotComputed:
    """Stands for an output that is computed from complete values, which a training call leaves split over ranks.

    It may be passed on and printed. Reading it raises an error that says where it is computed.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f"<{self._name}: not computed in training, par.predict(batch) has it>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"The output {self.__dict__['_name']} is computed from complete values, which a training call of several ranks leaves apart",
            fix="Read it from par.predict(batch), or from par(**batch) after par.eval()",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and other protocols of Python ask for
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse torch's functions that are given one, also inside lists."""
        found = next((value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)), None)
        return NotImplemented if found is None else found._refuse()


_READS = (
    "abs add and array bool contains eq float floordiv format ge getitem gt index int invert iter le len lt matmul mod mul ne neg or pos pow "
    "radd rand rfloordiv rmatmul rmod rmul ror round rpow rsub rtruediv rxor setattr setitem sub truediv xor"
)
"""The protocols of Python by which a value is read, which Python looks up in the class."""

for _protocol in _READS.split():
    setattr(NotComputed, f"__{_protocol}__", NotComputed._refuse)

_LOGGER = logging.getLogger("autopar")


class ModelOutputs:
    """What a model returns, on one rank; all ranks call the same methods.

    Args:
        held: the rank's parameters, as operators of outputs may read some.

    Attributes:
        is_loss_alone: whether the model returns only its loss.
        has_loss: whether the loss is part of what the model returns; it is not if ``loss_fn`` computes it.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        weights: ModelWeights,
        stages: Sequence[StageModule],
        held: Sequence[RankParameter],
    ) -> None:
        self._program, self._world, self._stages, self._held = program, world, stages, held
        self._plan: Plan = program.plan
        self._outputs: Outputs | None = program.graph.outputs
        self._taps: dict[Ref, Tap] = {}
        self._constants: dict[Ref, Tensor] = {}
        self._trained: dict[Ref, tuple[str, torch.dtype]] = {}
        self._told: set[str] = set()
        self._join = Join(program, world)
        self.is_loss_alone = self.has_loss = True
        if self._outputs is not None:
            self.is_loss_alone = self._outputs.structure.kind == "loss"
            self.has_loss = any(place.kind == "loss" for place in self._outputs.structure.all())
            self._find_taps(self._outputs)
            self._store_constants(self._outputs, weights)

    def _find_taps(self, outputs: Outputs) -> None:
        graph = self._program.graph
        places = {block.index: (stage, i) for stage in self._program.stages for i, block in enumerate(stage.blocks)}
        blocks: dict[int, dict[int, list[Ref]]] = {}
        for ref, traced in outputs.taps:
            stage, position = places[graph.block_of(ref.name)]
            layout = layout_of(graph, ref)
            self._taps[ref] = Tap(ref=ref, traced=traced, spec=graph.spec(ref), layout=layout, pp_rank=stage.pp_rank)
            blocks.setdefault(stage.index, {}).setdefault(position, []).append(ref)
        for module in self._stages:
            module.keep(blocks.get(module.index, {}))

    def _store_constants(self, outputs: Outputs, weights: ModelWeights) -> None:
        """Store values that no step changes, and of parameters that steps train the names and the dtypes that outputs read."""
        firsts = {name: p.fqn for p in self._program.graph.parameters for name in (p.fqn, *p.aliases)}
        for parameter in outputs.parameters:
            if parameter.fqn in firsts:
                self._trained[Ref(parameter.name)] = firsts[parameter.fqn], parameter.spec.dtype
                continue
            value = weights.parameter(parameter)
            self._constants[Ref(parameter.name)] = value.to(self._world.device, parameter.spec.dtype, copy=True)
        for buffer in outputs.buffers:
            known = weights.buffer(buffer.fqn, buffer.value) if buffer.fqn else buffer.value
            if known is not None:
                self._constants[Ref(buffer.name)] = known.to(self._world.device, buffer.spec.dtype)

    # --- before a forward pass

    def filled(self, batch: Any) -> tuple[Any, frozenset[str]]:
        """Return the batch with zeros for missing inputs that not all outputs need, and the names of these."""
        inputs = self._program.graph.inputs
        if self._outputs is None or not isinstance(batch, Mapping):
            return batch, frozenset()
        given = named_inputs(batch)
        missing = [leaf for leaf in inputs if leaf.name not in given]
        if not missing or any(name not in {leaf.name for leaf in inputs} for name in given):
            return batch, frozenset()
        names = frozenset(leaf.name for leaf in missing)
        if all(not names.isdisjoint(leaf.reads) for leaf in self._outputs.leaves if leaf.ref is not None):
            return batch, frozenset()  # no output could be computed: the input is required
        samples = num_samples(given, inputs)
        if samples is None:
            return batch, frozenset()
        return given | {leaf.name: _zeros(leaf, samples) for leaf in missing}, names

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Enter the context of a forward pass whose inner values are stored until :meth:`made` has joined them."""
        for stage in self._stages:
            stage.taken = {}
        try:
            yield
        finally:
            for stage in self._stages:
                stage.taken = None

    # --- after it

    def made(
        self,
        batch: Mapping[str, Any],
        split: BatchSplit,
        *,
        loss: Any,
        missing: frozenset[str] = frozenset(),
        gather: bool = True,
        communicates: bool = True,
    ) -> Any:
        """Return the outputs; call it inside :meth:`taking`.

        Args:
            batch: the batch as it was given.
            loss: the value that stands for the loss.
            missing: inputs that were not given; outputs that depend on them are None.
            gather: whether tensors are complete; otherwise they are DTensors that stay split.
            communicates: False, only with ``gather`` False, is a training call: collectives run only for DTensors, other outputs that need
                them are not computed, and only the loss has a gradient.
        """
        outputs = self._outputs
        assert outputs is not None
        given = named_inputs(batch)
        samples = self._samples(given, split)
        wanted = [leaf for leaf in outputs.leaves if leaf.ref is not None and missing.isdisjoint(leaf.reads)]
        makes = {op.name: op for op in outputs.ops}
        derived = [leaf for leaf in wanted if leaf.ref is not None and leaf.ref.name in makes]
        left = derived if not communicates and self._world.mesh.world_size > 1 else []
        if left:
            wanted, derived = [leaf for leaf in wanted if leaf not in left], []
        needed = ancestors(outputs.ops, [leaf.ref for leaf in derived if leaf.ref is not None])
        complete, dtensors = self._joined(wanted, needed, samples, gather=gather, plain=not communicates)
        env = complete | self._given(given, wanted, needed)
        if needed:
            env |= self._constants | self._trained_values(needed)
            self._compute(outputs, needed, samples, env)
        found: dict[int, Any] = {}
        for index, leaf in enumerate(outputs.leaves):
            if leaf in left:
                found[index] = NotComputed(leaf.name)
            elif leaf in wanted and leaf.ref is not None:
                value = dtensors.get(leaf.ref, env.get(leaf.ref, self._constants.get(leaf.ref)))
                value = self._replicated(value) if not gather and leaf.ref.name in makes else value
                found[index] = value if communicates else self._without_backward(leaf, value, makes)
            elif leaf.ref is None:
                self._tell(f"{leaf.name}: {leaf.reason}")
        more = Fraction(samples.total - outputs.batch_size, outputs.batch_size)
        return rebuilt(outputs.structure, loss, found.get, more)

    def _samples(self, given: Mapping[str, Any], split: BatchSplit) -> Samples:
        total = num_samples(given, self._program.graph.inputs) or self._plan.global_batch_size
        is_global = not split.is_full or total == self._plan.global_batch_size
        return Samples(split=split, is_global=is_global, total=total)

    def _joined(
        self,
        wanted: Sequence[Leaf],
        needed: Sequence[Op],
        samples: Samples,
        *,
        gather: bool,
        plain: bool,
    ) -> tuple[dict[Ref, Tensor], dict[Ref, Tensor]]:
        """Values of taps: complete ones (with ``plain`` also those that need no collective), and those that stay split."""
        read = {ref for op in needed for ref in op.operands}
        leaves = {leaf.ref for leaf in wanted}
        count = len(samples.split.micro_batches)
        taken = {number: {ref: value for stage in self._stages if stage.taken for ref, value in stage.taken.get(number, {}).items()}
                 for number in range(count)}  # fmt: skip
        complete, split = dict[Ref, Tensor](), dict[Ref, Tensor]()
        for ref, tap in self._taps.items():
            if ref not in read and ref not in leaves:
                continue
            value = self._join.stacked(tap, taken, count)
            stays = not gather and not (plain and self._join.is_local(tap, samples))
            if ref in read or not stays:
                complete[ref] = self._join.complete(tap, value, samples)
            if ref in leaves and stays:
                split[ref] = self._join.split(tap, value, samples)
        return complete, split

    def _given(self, given: Mapping[str, Any], wanted: Sequence[Leaf], needed: Sequence[Op]) -> dict[Ref, Tensor]:
        """Return inputs of the batch that are outputs, or from which outputs are computed."""
        names = {ref.name for op in needed for ref in op.operands} | {leaf.ref.name for leaf in wanted if leaf.ref}
        return {
            Ref(leaf.name): given[leaf.name].to(self._world.device, leaf.spec.dtype)
            for leaf in self._program.graph.inputs
            if leaf.name in names and leaf.name in given
        }

    def _trained_values(self, needed: Sequence[Op]) -> dict[Ref, Tensor]:
        """Return current values of trained parameters that operators of outputs read."""
        read = {ref: self._trained[ref] for op in needed for ref in op.operands if ref in self._trained}
        if not read:
            return {}
        graph, fqns = self._program.graph, sorted({fqn for fqn, _ in read.values()})
        names = {p.name for p in graph.parameters if p.fqn in fqns}
        parts = model_parts(graph, [h for h in self._held if h.name in names])
        whole = WholeTensors(parts, Peers(self._world.host_group()))
        values = {fqn: value for fqn in fqns if (value := whole.complete(fqn)) is not None}
        return {ref: values[fqn].to(self._world.device, dtype) for ref, (fqn, dtype) in read.items() if fqn in values}

    def _compute(self, outputs: Outputs, needed: Sequence[Op], samples: Samples, env: dict[Ref, Tensor]) -> None:
        if self._program.graph.exact and samples.total != outputs.batch_size:
            raise UsageError(
                f"Outputs of {samples.total} samples cannot be computed: the model was traced for {outputs.batch_size}, and may count them",
                fix=f"Pass {outputs.batch_size} samples, the complete global batch",
            )
        names = {op.name for op in needed}
        ops = [op for op in outputs.ops_at(samples.total) if op.name in names]
        device = ("device", self._world.device)
        ops = [replace(op, kwargs=(*op.kwargs, device)) if takes_device(op) else op for op in ops]
        with torch.no_grad():
            run(ops, env)

    def _without_backward(self, leaf: Leaf, value: Any, makes: Mapping[str, Op]) -> Any:
        """Return an output of a training call; a loss computed from it cannot run backward."""
        ref = leaf.ref
        if ref is None or not torch.is_grad_enabled():
            return value
        op, tap = makes.get(ref.name), self._taps.get(ref)
        spec = op.outputs[ref.index] if op is not None else tap.traced if tap is not None else None
        return without_gradient(value, leaf.name) if spec is not None and spec.requires_grad else value

    def _replicated(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self._world.mesh.world_size == 1:
            return value
        return DTensor.from_local(value, self._world.device_mesh["tp"], [Replicate()], run_check=False)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _LOGGER.warning("an output of the model is None, %s", text)


def _zeros(leaf: Input, samples: int) -> Tensor:
    shape = [samples if dim == leaf.batch_dim else size for dim, size in enumerate(leaf.spec.shape)]
    return torch.zeros(shape, dtype=leaf.spec.dtype)
