"""Resolves MODEL descriptions: a factory, a Hugging Face configuration, or a family with its sizes.

The forms are ``package.module:factory``, ``hf:DIR_OR_TYPE?key=value&...`` and ``gpt:layers=96,hidden=12288,...``; the other families are
``llama:``, ``mpt:``, ``bloom:`` and ``mixtral:``. Models are made on meta, so their weights take no memory before
:meth:`ModelSource.build`. Only the models of factories are on the device that the factory chose.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.models.inputs import Field, example_of, fields_of_config, fields_of_examples, random_batch
from autopar.models.specs import FAMILIES, MeanSquareLoss, family_model, hugging_face, model_types, quiet_transformers
from autopar.ops.opaque import without_dropout
from autopar.plan.plan import Plan
from autopar.tracing.batch import named_batch
from autopar.tracing.failures import FAILURES, user_line
from autopar.tracing.trace import trace


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model from a description: it can be traced, built with weights, and given batches. It is pickled by its description.

    Attributes:
        name: the description, which is also the name of the model in plans.
        model: the model, whose forward returns the loss. It is on meta in ``dtype``, or as the factory made it.
        fields: the inputs of the model.
        batch_size: samples of the example inputs.
        sequence_length: tokens of a sample, as requested; None for the length of the model.
        dtype: the dtype of the model's floating-point parameters and buffers.
        maker: makes the model again, with weights.
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
        """A batch with the values that a factory gave; tensors of other models are on meta."""
        return example_of(self.fields, self.batch_size)

    def make_batch(self, batch_size: int, *, seed: int = 0, padded: bool = False) -> dict[str, Any]:
        """Return a random valid batch on the CPU, which is the same for the same arguments.

        Args:
            padded: whether samples have different lengths, with ignored labels behind their ends and an attention mask, if the model has
                such inputs.
        """
        return random_batch(self.fields, batch_size, torch.Generator().manual_seed(seed), padded=padded)

    def build(self, seed: int = 0, *, drops: bool = False) -> torch.nn.Module:
        """Return the model on the CPU with random weights, which depend only on the seed; ``drops`` keeps its dropout."""
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(seed)
            model = _cast(self.maker(), self.dtype)
        if not drops:
            without_dropout(model)
        return model.train()

    def trace(self, opaque: Sequence[str] = ()) -> Graph:
        """Return the graph of :attr:`model` for :attr:`example_inputs`.

        Raises:
            TraceError: the model cannot be traced.
        """
        return trace(self.model, (), self.example_inputs, name=self.name, opaque=opaque, evaluates=False)

    def __reduce__(self) -> tuple[Any, ...]:
        resolve = partial(
            resolve_model, sequence_length=self.sequence_length, batch_size=self.batch_size, dtype=self.dtype
        )
        return resolve, (self.name,)


def resolve_model(
    spec: str, *, sequence_length: int | None = None, batch_size: int = 2, dtype: torch.dtype = torch.float32
) -> ModelSource:
    """Return the model that ``spec`` describes.

    Args:
        spec: a MODEL description; see this module.
        sequence_length: tokens of a sample; None for the longest that the model supports, at most 2048.
        batch_size: samples of the example inputs.
        dtype: the dtype of the model. A factory chooses the dtype of its model itself; ``build`` casts it.

    Raises:
        UsageError: a module cannot be imported, a family, model type or key is unknown, transformers is not installed, or the sequence is
            longer than the positions of the model.
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
        asked = (
            "hf:DIR with its config.json" if "/" in family else f"hf:{family if family in model_types() else 'TYPE'}"
        )
        raise UsageError.unknown(
            "kind of model", family, ("hf", *FAMILIES), fix=f"or write package.module:factory or {asked}"
        )
    with quiet_transformers(), torch.device("meta"):
        model = _cast(maker(), dtype)
    inner = model.model if isinstance(model, MeanSquareLoss) else model
    takes = tuple(inspect.signature(inner.forward).parameters)
    fields = fields_of_config(
        inner.config, head, str(inner.main_input_name), sequence_length, takes, partial(_places_of_image, inner)
    )
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


def _places_of_image(model: Any, shape: tuple[int, ...]) -> int:
    """Return how many tokens stand for an image [channels, height, width]: as many as the model has features of it.

    Raises:
        UsageError: the model does not say which features of images it has, or takes images otherwise.
    """
    try:
        pixels = torch.empty((1, *shape), dtype=next(model.parameters()).dtype, device="meta")
        with quiet_transformers(), torch.no_grad():
            found = model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        return sum(feature.shape[:-1].numel() for feature in (found if isinstance(found, list | tuple) else [found]))
    except FAILURES as error:
        raise UsageError(
            "Cannot make random images for this model",
            where=type(model).__name__,
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",
            fix="Give a factory `package.module:factory` that returns (model, example inputs)",
        ) from error


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast the real floating-point tensors of a model and return it; ``Module.to`` would drop the imaginary parts of complex buffers."""
    model._apply(lambda value: value.to(dtype) if value.is_floating_point() else value)  # type: ignore[no-untyped-call]
    return model


def example_batch_for(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return example inputs of two samples on meta, labels included, for a Hugging Face model; they are made from its config.

    Raises:
        UsageError: it is another kind of model, or one without a loss.
    """
    return example_of(_fields_for(model), 2)


def random_example_for(model: torch.nn.Module, *, batch_size: int) -> dict[str, torch.Tensor]:
    """Return the inputs of :func:`example_batch_for` for ``batch_size`` samples, with random values on the CPU."""
    return random_batch(_fields_for(model), batch_size, torch.Generator().manual_seed(0), padded=False)


def _fields_for(model: torch.nn.Module) -> tuple[Field, ...]:
    config = getattr(model, "config", None)
    name = type(model).__name__
    head = next((head for ending, head in _HEADS.items() if name.endswith(ending)), None)
    if config is None or head is None:
        raise UsageError(
            f"Cannot make example inputs for {name}: it is no Hugging Face model with a loss",
            fix="Pass example_inputs={...}, a dict for the model's forward, labels included (a factory returns it beside the model)",
        )
    return fields_of_config(config, head, str(model.main_input_name), None)


_HEADS = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "seq2seq",
    "ForImageClassification": "image",
}
"""The head of a Hugging Face model, by the last part of the name of its class."""


def is_factory(model: str) -> bool:
    """Return whether a MODEL description is ``package.module:factory``; a factory decides the sequence length itself.

    >>> is_factory("my.models:net"), is_factory("hf:gpt2")
    (True, False)
    """
    return model.partition(":")[0] not in ("hf", *FAMILIES)


def model_of(plan: Plan, file: Path) -> str:
    """Return the MODEL description from which a plan was made, which is the name of its model.

    Raises:
        UsageError: the plan was made in Python, for a model whose name is not a description.
    """
    if ":" not in plan.model.name:
        raise UsageError(
            f"The plan's model '{plan.model.name}' is no MODEL of the command line",
            where=str(file),
            fix="Say which model with --model",
        )
    return plan.model.name


def sequence_of(plan: Plan, model: str) -> int | None:
    """Return the sequence length of a plan's model in tokens; None for a factory and for a model that takes no tokens."""
    tokens = plan.model.tokens_per_sample
    return None if is_factory(model) or tokens < 2 else tokens


# --- factories ------------------------------------------------------------------------------------


def _from_factory(spec: str, sequence_length: int | None, batch_size: int, dtype: torch.dtype) -> ModelSource:
    """Return the model of a factory, with the fields of its example inputs."""
    factory = _import(spec)
    if sequence_length is not None:
        raise UsageError(
            f"--seq {sequence_length} does not go with a factory, which decides the sequence length",
            fix="Leave --seq out",
        )
    with torch.random.fork_rng(devices=[]):  # the seed of build(), as a graph keeps the values of constant buffers
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
"""Exceptions that a user's module or factory may raise."""


def _import(spec: str) -> Callable[[], Any]:
    """Import the factory of ``package.module:factory``; the current folder is on the path."""
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
            where=spec if missing else _with_line(spec, error),
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
    """Return the model of a factory, on the device that it chose, and its example inputs; None if it returns none."""
    try:
        with quiet_transformers():
            result = factory()
    except (*USER_FAILURES, SystemExit) as error:
        raise UsageError(
            "The factory failed",
            where=_with_line(spec, error),
            got=f"{type(error).__name__}: {error}",
            fix="Correct the factory: it runs without arguments and returns a model",
        ) from error
    model, examples = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
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
    """Check that further batches can be made from example inputs.

    Raises:
        UsageError: names the input that is neither a tensor nor a number or text.
    """
    for name, value in batch.items():
        if value is not None and not isinstance(value, torch.Tensor | bool | int | float | str):
            raise UsageError(
                f"The example input '{name}' is a {type(value).__name__}, not a tensor",
                where=spec,
                fix="Return a model whose forward takes tensors, numbers and texts by name. In Python, autopar.search() and autopar.parallelize() "
                "take any example inputs",
            )


def _with_line(spec: str, error: BaseException) -> str:
    """Return a description with the line where user code failed."""
    line = user_line(error, None)[0]
    if isinstance(error, SyntaxError) and error.filename:
        line = f"{error.filename}:{error.lineno}"
    return f"{spec}, {Path(line).name}" if line else spec


def _check_positions(model: torch.nn.Module, sequence_length: int | None, spec: str) -> None:
    """Check that tables of learned positions have an entry for each token of a sample.

    Raises:
        UsageError: the sequence is longer.
    """
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if (
            isinstance(module, torch.nn.Embedding)
            and ("position" in last or last == "wpe")
            and "vision" not in name  # its positions are those of image patches
            and sequence_length is not None
            and module.num_embeddings < sequence_length
        ):
            raise UsageError(
                f"--seq {sequence_length} is too long: the model has {module.num_embeddings} positions",
                where=spec,
                fix=f"Use --seq {module.num_embeddings} or less, or give the model more positions",
            )
