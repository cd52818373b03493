"""Hugging Face models from a type or folder and overrides, and families by their sizes.

Released configurations have keys that the configuration's class does not declare (``head_dim`` of Qwen3-MoE). As an object of the
class may lack them, the code of the model asks by ``getattr(config, "head_dim", ...)`` or ``hasattr(config, "head_dim")``: a plain
``config.head_dim`` is of another class.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch

from autopar.errors import UsageError
from autopar.tracing.failures import FAILURES

Function = ast.FunctionDef | ast.AsyncFunctionDef


def optional_keys(config_class: type) -> frozenset[str]:
    """Names that the modelling module beside a configuration's class asks for; empty: there is no such module.

    By its source alone, nothing of which is imported or run. A configuration that holds others (of towers) is only what is
    annotated as this class: the rest may be about those that it holds.
    """
    source = _modelling_source(config_class.__module__)
    if source is None:
        return frozenset()
    tree = ast.parse(source.read_text(encoding="utf-8"))
    holds_others = bool(getattr(config_class, "sub_configs", None))
    meant = {config_class.__name__} if holds_others else {config_class.__name__, ""}
    return frozenset(name for about, name in _asked(tree) if meant & about)


def _modelling_source(module: str) -> Path | None:
    """The file ``modeling_x.py`` beside the one of ``configuration_x``."""
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    found = file.with_name(file.name.replace("configuration_", "modeling_")) if file.name else file
    return found if found != file and found.is_file() else None


def _asked(tree: ast.Module) -> Iterator[tuple[frozenset[str], str]]:
    """Each name that is asked for, with the classes of the configuration as annotated; ``""``: it is not annotated."""
    for node in tree.body:
        if isinstance(node, Function):
            yield from _asked_in(node, {"config": _annotated(node)})
        elif isinstance(node, ast.ClassDef):
            functions = [part for part in node.body if isinstance(part, Function)]
            kept = next(
                (_annotated(function) for function in functions if function.name == "__init__"), frozenset({""})
            )
            for function in functions:
                yield from _asked_in(function, {"config": _annotated(function), "self.config": kept})


def _annotated(function: Function) -> frozenset[str]:
    arguments = (*function.args.args, *function.args.kwonlyargs)
    found = next((argument.annotation for argument in arguments if argument.arg == "config"), None)
    return frozenset({""} if found is None else ast.unparse(found).strip("'\"").split(" | "))


def _asked_in(function: Function, known: dict[str, frozenset[str]]) -> Iterator[tuple[frozenset[str], str]]:
    for node in ast.walk(function):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name() | ast.Attribute() as owner, ast.Constant(value=str() as name), *_],
            ) if (place := ast.unparse(owner)) in known:
                yield known[place], name


GRAMMAR = "Write package.module:factory, hf:TYPE?key=value, or gpt:layers=2,hidden=64,heads=4,vocab=128"
"""How a model is described, for errors."""


class MeanSquareLoss(torch.nn.Module):
    """A model without a loss of its own: the mean square of its first output, or the distance of its two towers'.

    What two towers (CLIP) give is compared pair by pair: a loss over all pairs of a batch, as CLIP's own, would
    depend on how the batch is cut.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """The scalar loss of a batch."""
        output = self.model(**batch)
        text, image = getattr(output, "text_embeds", None), getattr(output, "image_embeds", None)
        if isinstance(text, torch.Tensor) and isinstance(image, torch.Tensor):
            return (text.float() - image.float()).square().mean()
        return cast("torch.Tensor", output[0].float().square().mean())


# --- Hugging Face ---------------------------------------------------------------------------------


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps warnings and progress bars of transformers off the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "transformers" not in sys.modules:
            yield
            return
        logging = importlib.import_module("transformers.utils.logging")
        level = logging.get_verbosity()
        logging.set_verbosity(50)
        try:
            yield
        finally:
            logging.set_verbosity(level)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError.missing(
            "package transformers, which hf: models need", fix="Run: pip install 'autopar[hf]'"
        ) from error


def hugging_face(text: str) -> tuple[Callable[[], torch.nn.Module], str]:
    """How to make the model of ``TYPE_OR_FOLDER?key=value&...``, and its head.

    Raises:
        UsageError: an unknown type or key, or settings that fit no model.
    """
    where, _, query = text.partition("?")
    given = _values(query, "&")
    transformers = _transformers()
    with quiet_transformers():
        if where and Path(where).is_dir():
            load = partial(_local_config, transformers, where)
        else:
            known = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
            if where not in known:
                near = difflib.get_close_matches(where, known, 5, 0.5)
                raise UsageError(
                    f"Unknown model type 'hf:{where}': neither a model type of transformers nor a folder with config.json",
                    fix=f"Did you mean {', '.join(near)}?" if near else "See transformers' list of model types",
                )
            load = partial(transformers.AutoConfig.for_model, where)
        config = _configured(load, given, where)
    return _maker_of(transformers, config)


def _local_config(transformers: Any, where: str, **given: Any) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(where, local_files_only=True, **given)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            "No usable config.json in this folder",
            where=where,
            got=str(error).splitlines()[0][:200],
            fix="Save the model with model.save_pretrained(DIR)",
        ) from error


def _configured(load: Callable[..., Any], given: Mapping[str, Any], where: str) -> Any:
    """The configuration with overrides, checked by name: its class declares them, or the model's code asks for them.

    Token ids that the vocabulary lacks are mended. Layers are not left out at random unless it is asked for: which
    ones a step has is decided by numbers that no trace knows.
    """
    default = load()
    undeclared = [key for key in given if not hasattr(default, key)]
    optional = optional_keys(type(default)) if undeclared else frozenset()
    for key in undeclared:
        if key in optional:
            continue
        declared = {*default.to_dict(), *getattr(default, "attribute_map", {})} - {"transformers_version"}
        known = sorted(declared | optional)
        near = difflib.get_close_matches(key, known, 5, 0.5)
        raise UsageError(
            f"Unknown key '{key}' of the configuration of {where}",
            fix=(f"Did you mean {', '.join(near)}? " if near else "") + f"Known: {', '.join(known)}",
        )
    names = getattr(default, "attribute_map", {})
    for one, other in combinations(given, 2):
        if names.get(one, one) == names.get(other, other):
            raise UsageError(f"'{one}' and '{other}' are one setting of {where}, given twice", fix="Keep one of them")
    try:
        config = load(**given)
    except Exception as error:  # a configuration checks itself, with errors of its library
        raise _unfit(error, where) from error
    _check_sizes(config, given, where)
    _mend(config, given)
    return config


def _check_sizes(config: Any, given: Mapping[str, Any], where: str) -> None:
    """What makes a model without layers, or one that cannot run, and that no configuration looks at."""
    layers, heads, shared = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    if given and isinstance(layers, int) and layers < 1:
        raise UsageError(f"The model has {layers} layers", where=where, fix="Set num_hidden_layers to 1 or more")
    if given and isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UsageError(
            f"{shared} heads of keys and values do not divide {heads} attention heads",
            where=where,
            fix="Set num_key_value_heads to a divisor of num_attention_heads",
        )


def _mend(config: Any, given: Mapping[str, Any]) -> None:
    """Sets what training needs otherwise than a published checkpoint, where it is not in ``given``."""
    config.use_cache = False
    if getattr(config, "architectures", None) is None:
        config.architectures = []  # transformers looks through them where a type has several heads
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if name not in given and getattr(config, name, None):
            setattr(config, name, 0.0)
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, int) and token >= vocabulary and name not in given:
                setattr(config, name, None if name == "pad_token_id" else vocabulary - 1)
    if getattr(config, "is_encoder_decoder", False):
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id


_UNFIT_FIX = "Correct the keys after `?`, or give a factory `package.module:factory`"


def _unfit(error: BaseException, where: str) -> UsageError:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    value = f"{type(error).__name__}: {first[:200]}"
    if isinstance(error, ImportError):
        return UsageError(
            "The model needs a package that is not installed", where=where, got=value, fix="Install what it names"
        )
    return UsageError("These settings make no model", where=where, got=value, fix=_UNFIT_FIX)


def _maker_of(transformers: Any, config: Any) -> tuple[Callable[[], torch.nn.Module], str]:
    """How to make the model with the head that has a loss, and which head that is."""
    auto = transformers.models.auto.modeling_auto
    kind = config.model_type
    mappings = (
        ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
        ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq"),
        ("masked", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
        ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
        ("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    )
    towers = hasattr(config, "text_config") and hasattr(config, "vision_config")
    for head, mapping, loader in mappings:
        if head == "image" and towers:  # the classifier has one of them alone
            continue
        if kind in getattr(auto, mapping, {}):
            return partial(_make, getattr(transformers, loader), config, wrap=False), head
    if kind not in auto.MODEL_MAPPING_NAMES:
        raise UsageError.unsupported(
            f"The model type '{kind}'",
            instead="Give a factory `package.module:factory` that returns (model, example inputs)",
        )
    return partial(_make, transformers.AutoModel, config, wrap=True), "base"


def _make(loader: Any, config: Any, *, wrap: bool) -> torch.nn.Module:
    """The model with fused attention and grouped experts, or with as much of that as its type knows."""
    ways: tuple[dict[str, str], ...] = (
        {"attn_implementation": "sdpa", **_EXPERTS},
        {"attn_implementation": "sdpa"},
        {"attn_implementation": "eager", **_EXPERTS},
        {"attn_implementation": "eager"},
    )
    if not (hasattr(config, "num_local_experts") or hasattr(config, "num_experts")):
        ways = ways[1::2]
    for way in ways:
        try:
            model = loader.from_config(copy.deepcopy(config), **way)  # which it changes, even where it fails
        except FAILURES as error:  # settings that fit no model, or a package of transformers' own that is missing
            if way is ways[-1] or not isinstance(error, ValueError | TypeError):
                raise _unfit(error, str(config.model_type)) from error
        else:
            return MeanSquareLoss(model) if wrap else cast("torch.nn.Module", model)
    raise AssertionError("the last way returns or raises")


_EXPERTS = {"experts_implementation": "grouped_mm"}
"""The only one of transformers' experts that exports without control flow on data, and computes no expert in vain."""


# --- families -------------------------------------------------------------------------------------

_OF_GPT2 = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "ffn": "n_inner",
    "seq": "n_positions",
}

_OF_LLAMA = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "seq": "max_position_embeddings",
}

FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "gpt": ("gpt2", _OF_GPT2),
    "llama": ("llama", {**_OF_LLAMA, "tied": "tie_word_embeddings"}),
    "mpt": ("gpt2", _OF_GPT2),
    "bloom": ("bloom", {"layers": "n_layer", "hidden": "hidden_size", "heads": "n_head", "vocab": "vocab_size"}),
    "mixtral": ("mixtral", {**_OF_LLAMA, "experts": "num_local_experts", "top_k": "num_experts_per_tok"}),
}
"""The Hugging Face type of each family, and the keys of ours by theirs; ``dropout`` (0) is common to all.

MPT as MosaicML trains it (fused attention, exact GELU, learned positions) is a GPT of PyTorch's fused
operators; Hugging Face's class of that name holds all attention scores: ``hf:mpt`` gives that one.
"""

_FIXED = {"mpt": {"activation_function": "gelu"}}

_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "llama": ("attention_dropout",),
    "mixtral": ("attention_dropout",),
}


def family_model(name: str, text: str, sequence_length: int | None) -> tuple[Callable[[], torch.nn.Module], str]:
    """How to make the model of ``layers=2,hidden=64,...`` of a family, and its head.

    Raises:
        UsageError: an unknown key, or sizes that fit no model.
    """
    kind, keys = FAMILIES[name]
    given = _values(text, ",")
    known = [*keys, "dropout"]
    for key, value in given.items():
        if key not in known:
            raise UsageError.unknown(f"{name} setting", key, known)
        if key != "dropout" and not isinstance(value, int):
            raise UsageError(f"{name}:{key} is {value!r}, not a whole number", fix=f"Write for example {key}=8")
        if key not in ("dropout", "tied") and value < 1:
            raise UsageError(f"{name}:{key} is {value}, which is below 1", fix=f"Write for example {key}=8")
    hidden, heads = given.get("hidden"), given.get("heads")
    if hidden and heads and hidden % heads:
        raise UsageError(
            f"The hidden size {hidden} does not divide by {heads} heads",
            where=name,
            fix=f"Set hidden to a multiple of {heads}, or other heads",
        )
    transformers = _transformers()
    values = {keys[key]: value for key, value in given.items() if key != "dropout"}
    values |= _FIXED.get(name, {})
    values |= dict.fromkeys(_DROPOUTS[kind], given.get("dropout", 0.0))
    if "kv_heads" in keys and "kv_heads" not in given and heads:
        values["num_key_value_heads"] = heads
    if "tied" in given:
        values["tie_word_embeddings"] = bool(given["tied"])
    if "seq" in keys and sequence_length is not None:
        values[keys["seq"]] = max(sequence_length, values.get(keys["seq"], 0))
    with quiet_transformers():
        config = _configured(partial(transformers.AutoConfig.for_model, kind), values, name)
    return _maker_of(transformers, config)


def _values(text: str, separator: str) -> dict[str, Any]:
    """``a=1&b=[2]`` as a dict; values are JSON where they can be, or ``True``, ``False`` and ``None`` as in Python; text otherwise."""
    python = {"True": True, "False": False, "None": None}
    result: dict[str, Any] = {}
    for item in _split(text, separator):
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise UsageError(f"The setting '{item}' of the model is not of the form key=value", fix=GRAMMAR)
        if re.search(r"^[^\[{\"]*[,&;] *\w+=", value):
            raise UsageError(f"'{item}' is more than one setting of the model", fix=f"Separate them by '{separator}'")
        key = key.strip()
        if key in result:
            raise UsageError(f"The setting '{key}' of the model is given twice", fix="Keep one of them")
        try:
            result[key] = json.loads(value)
        except json.JSONDecodeError:
            result[key] = python.get(value, value)
    return result


def _split(text: str, separator: str) -> list[str]:
    """Splits outside of brackets; the shell's ``depths=[1,1]`` stays whole."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{") - (c in "]}")
        if c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part for part in parts if part]
