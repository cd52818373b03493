"""Exports weights as ``save_pretrained`` of transformers does: safetensors under the model's names, with an index for several files.

Ranks write the files in turn, tensor by tensor, so that a rank never holds more of the model than what it trains and one tensor.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch

from autopar.errors import UsageError, first_line, shown
from autopar.runtime.checkpoint.checkpoint_index import as_bytes
from autopar.runtime.checkpoint.contents import WholeTensors
from autopar.runtime.checkpoint.write import Staging, commit, header, new_file, write_synced
from autopar.runtime.state_dict import Untrained
from autopar.runtime.world import Peers
from autopar.util.formatting import SIZE, bytes_of

_INDEX = "model.safetensors.index.json"
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(_INDEX))


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

    tensors: WholeTensors
    untrained: Untrained
    facts: ModelFacts
    peers: Peers

    def save(self, path: str | Path, max_shard_size: str | int) -> None:
        """Write the folder.

        Raises:
            UsageError: it cannot be written; raised on all ranks.
        """
        limit, place = bytes_of(max_shard_size), Path(path).absolute()
        if limit is None:
            raise UsageError(f"The max_shard_size is {shown(max_shard_size)}", fix=f"Give {SIZE}")
        files, staging = self._files(limit), Staging(place, f"the weights to {place}", self.peers)
        with staging.complete_or_not(""):
            with self.peers.failing_together(), staging.errors():
                self._write(files, staging.place)
                if self.peers.rank == 0:
                    self._describe(files, staging.place)
            self.peers.from_first_rank(lambda: _commit(staging))

    def _files(self, limit: int) -> _Files:
        """Return the tensors of each file in the order of the state dict, each tied one once, by its first name."""
        known = (name for name in dict.fromkeys(self.untrained.names.values()) if name in self.tensors.shapes)
        names = [name for name in known if name not in self.facts.ignored]
        shards: list[list[str]] = [[]]
        room = limit
        for name in names:
            size = self._num_bytes(name)
            if shards[-1] and size > room:
                shards.append([])
                room = limit
            shards[-1].append(name)
            room -= size
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}

    def _write(self, files: _Files, place: Path) -> None:
        """Write this rank's files. Whoever writes one receives its tensors from all ranks; a rank that has failed still sends its parts.

        Raises:
            OSError: a file of this rank cannot be written.
        """
        failure: OSError | None = None
        for number, (file, names) in enumerate(files.items()):
            writer, dtypes = number % self.peers.size, self.untrained.dtypes
            values = (self.tensors.complete(name, dtype=dtypes[name], to=writer) for name in names)
            if writer == self.peers.rank and failure is None:
                try:
                    place.mkdir(parents=True, exist_ok=True)
                    with new_file(place / file) as opened:
                        shapes = self.tensors.shapes
                        opened.write(header([(name, dtypes[name], shapes[name]) for name in names], {"format": "pt"}))
                        opened.writelines(as_bytes(value) for value in values if value is not None)
                except OSError as error:
                    failure = error
            for _ in values:
                pass
        if failure is not None:
            raise failure

    def _num_bytes(self, name: str) -> int:
        return prod(self.tensors.shapes[name]) * self.untrained.dtypes[name].itemsize

    def _describe(self, files: _Files, place: Path) -> None:
        """Write the index of several files and the model's configurations; called on rank 0."""
        if len(files) > 1:
            of = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(map(self._num_bytes, of))}, "weight_map": of}
            write_synced(place / _INDEX, json.dumps(index, indent=2).encode())
        try:
            for config in self.facts.configs:
                config.save_pretrained(place)
        except (ValueError, TypeError) as error:  # of a configuration that contradicts itself
            raise UsageError(
                f"Cannot write the weights to {place}: transformers does not write the model's configuration",
                got=first_line(error),
                fix="Correct model.config or model.generation_config before autopar.parallelize, which keeps copies of them",
            ) from error


def _commit(staging: Staging) -> None:
    """Move the written files on rank 0 to their folder, where they replace older weights; an index of several files comes last."""
    with staging.errors():
        commit(staging, (_INDEX,), _WRITTEN)
