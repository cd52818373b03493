"""MODEL descriptions: a factory, a Hugging Face configuration, or a family with its sizes.

``package.module:factory``, ``hf:DIR_OR_TYPE?key=value&...``, ``gpt:layers=96,hidden=12288,...`` and
likewise ``llama:``, ``mpt:``, ``bloom:``, ``mixtral:``. Models come on meta: nothing of their size is
allocated until :meth:`ModelSource.build`.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.models.inputs import Field, example_of, fields_of_config, fields_of_examples, random_batch
from autopar.models.specs import FAMILIES, MeanSquareLoss, family_model, hugging_face, quiet_transformers
from autopar.tracing.batch import named_batch
from autopar.tracing.failures import FAILURES
from autopar.tracing.trace import trace


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be traced, built and fed; picklable by its description.

    Attributes:
        name: the description it came from, and its name in plans.
        model: on meta in the dtype asked for, or as the factory made it; returns its loss.
        fields: its inputs.
        batch_size, sequence_length, dtype: of the example inputs and the model.
    """

    name: str
    model: torch.nn.Module
    fields: tuple[Field, ...]
    batch_size: int
    sequence_length: int | None
    dtype: torch.dtype
    maker: Callable[[], torch.nn.Module]

    @property
    def example_inputs(self) -> dict[str, Any]:
        """A batch on meta: shapes and dtypes, and constants."""
        return example_of(self.fields, self.batch_size)

    def make_batch(self, batch_size: int, *, seed: int = 0, padded: bool = False) -> dict[str, Any]:
        """A random valid batch on CPU, equal for equal arguments.

        Args:
            padded: samples of different lengths, with ignored labels where they end and an
                attention mask, where the model knows such.
        """
        return random_batch(self.fields, batch_size, torch.Generator().manual_seed(seed), padded=padded)

    def build(self, seed: int = 0, *, drops: bool = False) -> torch.nn.Module:
        """The model on CPU with random weights, equal for equal seeds; without dropout, unless it ``drops``."""
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(seed)
            model = _cast(self.maker(), self.dtype)
        if not drops:
            without_dropout(model)
        return model.train()

    def trace(self, opaque: Sequence[str] = ()) -> Graph:
        """The graph of :attr:`model` on :attr:`example_inputs`.

        Raises:
            TraceError: it cannot be traced.
        """
        return trace(self.model, (), self.example_inputs, name=self.name, opaque=opaque)

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(
            resolve_model, sequence_length=self.sequence_length, batch_size=self.batch_size, dtype=self.dtype
        )
        return again, (self.name,)


def resolve_model(
    spec: str, *, sequence_length: int | None = None, batch_size: int = 2, dtype: torch.dtype = torch.float32
) -> ModelSource:
    """The model that ``spec`` describes.

    Args:
        spec: MODEL; see the module.
        sequence_length: tokens of a sample; the model's longest (at most 2048) when None.
        batch_size: of the example inputs.

    Raises:
        UsageError: a module that does not import, an unknown family, model type or key, a missing
            transformers, a sequence that the model's positions do not reach.
    """
    family, colon, rest = spec.partition(":")
    if colon and family == "hf":
        maker, head = hugging_face(rest)
    elif colon and family in FAMILIES:
        maker, head = family_model(family, rest, sequence_length)
    elif family and colon and "=" not in rest and rest:
        return _from_factory(spec, sequence_length, batch_size, dtype)
    elif spec in ("hf", *FAMILIES):
        raise UsageError(
            f"'{spec}' is a kind of model, and no model yet",
            fix="Write hf:TYPE or its sizes, for example gpt:layers=4,hidden=256,heads=4",
        )
    else:
        fix = "or write package.module:factory or hf:TYPE"
        raise UsageError.unknown("kind of model", family, ("hf", *FAMILIES), fix=fix)
    with quiet_transformers(), torch.device("meta"):
        model = _cast(maker(), dtype)
    inner = model.model if isinstance(model, MeanSquareLoss) else model
    takes = tuple(inspect.signature(inner.forward).parameters)
    fields = fields_of_config(inner.config, head, str(inner.main_input_name), sequence_length, takes)
    if any(f.shape[:1] == (sequence_length,) for f in fields):
        _check_positions(model, sequence_length, spec)
    if head == "image" or not any(f.kind == "tokens" for f in fields):
        fields = tuple(replace(f, dtype=dtype) if f.kind == "floats" else f for f in fields)
    return ModelSource(
        name=spec,
        model=model,
        fields=fields,
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        maker=maker,
    )


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model with its real floating numbers in ``dtype``: ``Module.to`` would take the imaginary parts from complex buffers."""
    model._apply(lambda value: value.to(dtype) if value.is_floating_point() else value)  # type: ignore[no-untyped-call]
    return model


def example_batch_for(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Example inputs of two samples, labels included, for a Hugging Face model, made from its config; on meta.

    Raises:
        UsageError: another kind of model, or one without a loss.
    """
    return example_of(_fields_for(model), 2)


def random_example_for(model: torch.nn.Module, *, batch_size: int) -> dict[str, torch.Tensor]:
    """As :func:`example_batch_for`, with random values on the CPU."""
    return random_batch(_fields_for(model), batch_size, torch.Generator().manual_seed(0), padded=False)


def _fields_for(model: torch.nn.Module) -> tuple[Field, ...]:
    config = getattr(model, "config", None)
    head = head_of(type(model).__name__)
    if config is None or head is None:
        raise UsageError(
            f"Cannot make example inputs for {type(model).__name__}: it is no Hugging Face model with a loss",
            fix="Pass example_inputs={...}, a dict for the model's forward, labels included (a factory returns it beside the model)",
        )
    return fields_of_config(config, head, str(model.main_input_name), None)


def head_of(class_name: str) -> str | None:
    """causal, masked, seq2seq or image, told by the name of a Hugging Face class."""
    heads = {
        "ForCausalLM": "causal",
        "LMHeadModel": "causal",
        "ForMaskedLM": "masked",
        "ForConditionalGeneration": "seq2seq",
        "ForImageClassification": "image",
    }
    return next((head for ending, head in heads.items() if class_name.endswith(ending)), None)


def without_dropout(model: torch.nn.Module) -> None:
    """Sets every probability of dropping something, and every noise of a router, to 0, in modules and in what they copied of a config."""
    configs: dict[int, tuple[Any, Any]] = {}  # of which forward may make further modules; the user's own stays as it is
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _drop_nothing(module)
        config = vars(module).get("config")
        if hasattr(config, "__dict__"):
            if id(config) not in configs:
                configs[id(config)] = config, copy.copy(config)
                _drop_nothing(configs[id(config)][1])
            module.config = configs[id(config)][1]


def _drop_nothing(holder: Any) -> None:
    for name, value in list(vars(holder).items()):
        if isinstance(value, float) and any(word in name for word in _DROPPING):
            setattr(holder, name, 0.0)


_DROPPING = ("dropout", "pdrop", "drop_prob", "drop_path", "layerdrop", "jitter_noise")
"""In the names of attributes: elements, whole branches of a sample, layers, and what a router multiplies its input by."""


# --- factories ------------------------------------------------------------------------------------


def _from_factory(spec: str, sequence_length: int | None, batch_size: int, dtype: torch.dtype) -> ModelSource:
    factory = _import(spec)
    if sequence_length is not None:
        raise UsageError(
            f"--seq {sequence_length} does not go with a factory, which decides the sequence length",
            fix="Leave --seq out",
        )
    with torch.random.fork_rng(devices=[]):  # as a build draws: a graph keeps the values of constant buffers
        torch.manual_seed(0)
        model, examples = _call(factory, spec)
    if examples is None:
        size, fields = batch_size, _fields_for(model)
    else:
        by_position = (examples,) if isinstance(examples, torch.Tensor) else examples
        batch = dict(examples) if isinstance(examples, Mapping) else named_batch(model, tuple(by_position), {})
        _check_tensors(batch, spec)
        tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim()]
        size = tensors[0].shape[0] if tensors else batch_size
        fields = fields_of_examples(batch, size)
    return ModelSource(
        name=spec,
        model=model,
        fields=fields,
        batch_size=size,
        sequence_length=None,
        dtype=dtype,
        maker=lambda: _call(factory, spec)[0],
    )


USER_FAILURES = (*FAILURES, OSError, SyntaxError)
"""What a user's module or factory raises."""


def _import(spec: str) -> Callable[[], Any]:
    path, _, attribute = spec.partition(":")
    if "/" in path or (path.endswith(".py") and Path(path).is_file()):
        raise UsageError(
            f"'{path}' is the path of a file, and no module",
            where=spec,
            fix=f"Start in the folder that holds it, and write {Path(path).name.removesuffix('.py')}:{attribute}",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except (*USER_FAILURES, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError)
        raise UsageError(
            f"Cannot import module '{path}'",
            where=spec if missing else f"{spec}, {_last_line(error)}",
            got=f"{type(error).__name__}: {error}",
            fix="Start in the folder that holds it, or install it" if missing else "Correct that line of the module",
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = difflib.get_close_matches(attribute, [n for n in dir(module) if callable(getattr(module, n))])
        raise UsageError(
            f"No function '{attribute}' in module {path}"
            if factory is None
            else f"'{attribute}' of module {path} cannot be called",
            where=spec,
            fix=f"Did you mean {', '.join(near)}?" if near else "Name a function that returns a model",
        )
    return cast("Callable[[], Any]", factory)


def _call(factory: Callable[[], Any], spec: str) -> tuple[torch.nn.Module, Any]:
    """The factory's model, on the device it chose, and its example inputs."""
    try:
        with quiet_transformers():
            made = factory()
    except (*USER_FAILURES, SystemExit) as error:
        raise UsageError(
            "The factory failed",
            where=f"{spec}, {_last_line(error)}",
            got=f"{type(error).__name__}: {error}",
            fix="Correct the factory: it runs without arguments and returns a model",
        ) from error
    model, examples = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module) or not isinstance(examples, torch.Tensor | tuple | list | Mapping | None):
        raise UsageError(
            "The factory returned something else than a model",
            where=spec,
            expected="a model, or a model and its example inputs (a dict, a list or a tensor)",
            got=type(model if not isinstance(model, torch.nn.Module) else examples).__name__,
            fix="Return (model, {'input_ids': ...})",
        )
    return model, examples


def _check_tensors(batch: Mapping[str, Any], spec: str) -> None:
    """Refuse example inputs of which no further batches can be made.

    Raises:
        UsageError: names the entry.
    """
    for name, value in batch.items():
        if value is not None and not isinstance(value, torch.Tensor | bool | int | float | str):
            raise UsageError(
                f"The example input '{name}' is a {type(value).__name__}, not a tensor",
                where=spec,
                fix="Return a model whose forward takes tensors, numbers and texts by name. In Python, autopar.search() and autopar.parallelize() "
                "take any example inputs",
            )


def _last_line(error: BaseException) -> str:
    """Where user code failed: the innermost line that is not of an installed package, else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    standard = sysconfig.get_paths()["stdlib"]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(("<", standard))]
    last = [f for f in own if Path(__file__).parents[1] not in Path(f.filename).parents] or frames
    return f"{Path(last[-1].filename).name}:{last[-1].lineno}"


def _check_positions(model: torch.nn.Module, sequence_length: int | None, spec: str) -> None:
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if (
            isinstance(module, torch.nn.Embedding)
            and ("position" in last or last == "wpe")
            and "vision" not in name  # positions of patches
            and sequence_length is not None
            and module.num_embeddings < sequence_length
        ):
            raise UsageError(
                f"--seq {sequence_length} is too long: the model has {module.num_embeddings} positions",
                where=spec,
                fix=f"Use --seq {module.num_embeddings} or less, or give the model more positions",
            )
