"""Exports weights as ``save_pretrained`` of transformers does: safetensors under the model's names, with an index for several files.

Each rank writes some of the files. For each tensor in them it receives the boxes of other ranks, so that a rank never holds more of the
model than what it trains and one tensor.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import UsageError, first_line
from autopar.graph.graph import Graph
from autopar.runtime.checkpoint import write
from autopar.runtime.checkpoint.chunk_files import Part, as_bytes, header, new_file
from autopar.runtime.checkpoint.contents import part_of
from autopar.runtime.checkpoint.write import Box, Target
from autopar.runtime.state_dict import Untrained
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.world import Meeting

_INDEX = "model.safetensors.index.json"
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(_INDEX))
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The contents of a folder of transformers besides the weights.

    Attributes:
        configs: objects with ``save_pretrained``: the model's ``config`` and ``generation_config``, if it has them.
        ignored: names that the model's own ``save_pretrained`` leaves out.
    """

    configs: tuple[Any, ...] = ()
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        """Copy of the model's configurations, as the model may be changed or freed later."""
        config: Any = getattr(model, "config", None)
        if not callable(getattr(config, "save_pretrained", None)):
            return cls()
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.dtype = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        more = getattr(model, "generation_config", None)
        configs = (config, copy.deepcopy(more)) if callable(getattr(more, "save_pretrained", None)) else (config,)
        return cls(configs=configs, ignored=frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ()))


_Files: TypeAlias = Mapping[str, Sequence[str]]
"""The names of the tensors in each file, in order. Ranks write the files in turn."""


@dataclass(slots=True, kw_only=True)
class Export:
    """The export of one model; all ranks make one and call it."""

    graph: Graph
    held: Sequence[RankParameter]
    buffers: Mapping[str, Tensor]
    untrained: Untrained
    facts: ModelFacts
    meeting: Meeting
    _own: dict[Box, Part] = field(default_factory=dict)
    _sources: defaultdict[str, list[tuple[int, Box]]] = field(default_factory=lambda: defaultdict(list))

    def save(self, path: str | Path, max_shard_size: str | int) -> None:
        """Write the folder.

        Raises:
            UsageError: it cannot be written; raised on all ranks.
        """
        limit, place = num_bytes(max_shard_size), Path(path).absolute()
        self._own = {write.box_of(part): part for part in self._parts()}
        for box, rank in write.source_ranks(self.meeting.all_gather(list(self._own))).items():
            self._sources[box[0]].append((rank, box))
        shapes = {name: boxes[0][1][1] for name, boxes in self._sources.items()}
        files = self._files(shapes, limit)
        target = self.meeting.from_first_rank(lambda: _begun(place))
        try:
            with self.meeting.failing_together(), _as_usage_errors(place):
                self._write(files, shapes, write.staging_folder(place, target))
                if self.meeting.rank == 0:
                    self._describe(files, shapes, write.staging_folder(place, target))
            self.meeting.from_first_rank(lambda: _commit(place, target))
        except UsageError:
            write.remove_failed(place, target, name="", is_first=self.meeting.rank == 0)
            raise

    def _parts(self) -> Iterable[Part]:
        """Yield this rank's elements as parts of the model's tensors; without empty ones."""
        parameters = {p.name: p for p in self.graph.parameters}
        for h in self.held:
            ir = parameters[h.name]
            part = part_of(ir.fqn, h.parameter.detach(), h.padding)
            if ir.part is not None:
                start, whole = list(part.offset), list(part.whole)
                start[ir.part.dim] += ir.part.start
                whole[ir.part.dim] = self.untrained.shapes[ir.fqn][ir.part.dim]
                part = Part(name=ir.fqn, whole=tuple(whole), offset=tuple(start), value=part.value)
            if part.value.numel():
                yield part
        for name, value in (*self.buffers.items(), *self.untrained.own.items()):
            if name in self.untrained.dtypes:
                yield part_of(name, value)

    def _files(self, shapes: Mapping[str, tuple[int, ...]], limit: int) -> _Files:
        """Return the tensors of each file in the order of the state dict, each tied one once, by its first name."""
        names = [n for n in dict.fromkeys(self.untrained.names.values()) if n in shapes and n not in self.facts.ignored]
        shards: list[list[str]] = [[]]
        room = limit
        for name in names:
            size = prod(shapes[name]) * self.untrained.dtypes[name].itemsize
            if shards[-1] and size > room:
                shards.append([])
                room = limit
            shards[-1].append(name)
            room -= size
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}

    def _write(self, files: _Files, shapes: Mapping[str, tuple[int, ...]], place: Path) -> None:
        """Write this rank's files. In each round every writer receives one tensor; a rank that has failed still takes part."""
        turns = [
            [(file, name) for file in list(files)[rank :: self.meeting.size] for name in files[file]]
            for rank in range(self.meeting.size)
        ]
        failure: OSError | None = None
        current = ""
        with ExitStack() as open_files:
            for turn in range(max(map(len, turns), default=0)):
                wanted = {rank: queue[turn] for rank, queue in enumerate(turns) if turn < len(queue)}
                value = self._exchanged({rank: name for rank, (_, name) in wanted.items()}, shapes)
                if value is None or failure is not None:
                    continue
                try:
                    file = wanted[self.meeting.rank][0]
                    if file != current:
                        open_files.close()
                        place.mkdir(parents=True, exist_ok=True)
                        current, opened = file, open_files.enter_context(new_file(place / file))
                        named = [(name, self.untrained.dtypes[name], shapes[name]) for name in files[file]]
                        opened.write(header(named, {"format": "pt"}))
                    opened.write(as_bytes(value))
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure

    def _exchanged(self, wanted: Mapping[int, str], shapes: Mapping[str, tuple[int, ...]]) -> Tensor | None:
        """Return the complete tensor that this rank writes next, or None; sends this rank's boxes of the tensors that others write.

        Args:
            wanted: the name of the tensor that each writing rank receives.
        """
        rank = self.meeting.rank
        received = wanted.get(rank)
        result = None if received is None else torch.empty(shapes[received], dtype=self.untrained.dtypes[received])
        works, buffers, boxes = list[Any](), list[Tensor](), list[tuple[Box, Tensor]]()
        for writer, name in wanted.items():
            for source, box in self._sources[name]:
                if source == rank:
                    value = self._own[box].value.to("cpu", self.untrained.dtypes[name]).contiguous()
                    if writer == rank:
                        boxes.append((box, value))
                    else:
                        buffers.append(_flat(value))
                        works.append(dist.isend(buffers[-1], group=self.meeting.group, group_dst=writer))
                elif writer == rank:
                    value = torch.empty(box[3], dtype=self.untrained.dtypes[name])
                    boxes.append((box, value))
                    buffers.append(_flat(value))
                    works.append(dist.irecv(buffers[-1], group=self.meeting.group, group_src=source))
        for work in works:
            work.wait()
        if result is not None:
            for (_, _, offset, shape, _), value in boxes:
                result[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = value
        return result

    def _describe(self, files: _Files, shapes: Mapping[str, tuple[int, ...]], place: Path) -> None:
        """Write the index of several files and the model's configurations; called on rank 0."""
        if len(files) > 1:
            of = {name: file for file, names in files.items() for name in names}
            total = sum(prod(shapes[name]) * self.untrained.dtypes[name].itemsize for name in of)
            index = {"metadata": {"total_size": total}, "weight_map": of}
            write.write_synced(place / _INDEX, json.dumps(index, indent=2).encode())
        try:
            for config in self.facts.configs:
                config.save_pretrained(place)
        except (ValueError, TypeError) as error:  # of a configuration that contradicts itself
            raise UsageError(
                f"Cannot write the weights to {place}: transformers does not write the model's configuration",
                got=first_line(error),
                fix="Correct model.config or model.generation_config before autopar.parallelize, which keeps copies of them",
            ) from error


def num_bytes(size: str | int) -> int:
    """Return the bytes of a size in the notation of transformers.

    Raises:
        UsageError: it is not a size.

    >>> num_bytes("5GB"), num_bytes("20 KB"), num_bytes(7)
    (5000000000, 20000, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", str(size).upper())
    if isinstance(size, int) and size > 0:
        return size
    if match is None:
        raise UsageError(
            f"The max_shard_size {size!r} is no size", fix='Write a number of bytes, or "5GB", "500MB", "2GiB"'
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _flat(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def _begun(place: Path) -> Target:
    with _as_usage_errors(place):
        return write.begin_save(place)


def _commit(place: Path, target: Target) -> None:
    """Move the written files on rank 0 to their folder, where they replace older weights; an index of several files comes last."""
    staged = write.staging_folder(place, target)
    with _as_usage_errors(place):
        if not target.is_there:
            staged.rename(place)
            return
        names = sorted((path.name for path in staged.iterdir()), key=lambda name: name == _INDEX)
        for name in names:
            (staged / name).replace(place / name)
        staged.rmdir()
    with suppress(OSError):
        for path in place.iterdir():
            if _WRITTEN.fullmatch(path.name) and path.name not in names:
                path.unlink()


def _as_usage_errors(place: Path) -> AbstractContextManager[None]:
    return write.as_usage_errors(f"the weights to {place}")
