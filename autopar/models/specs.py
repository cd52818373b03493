"""Makes Hugging Face models from a type or folder with overrides, and families from their sizes."""

from __future__ import annotations

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
from autopar.models.inputs import IMAGE_TOKENS, input_keys
from autopar.tracing.failures import FAILURES

GRAMMAR = "Write package.module:factory, hf:TYPE?key=value, or gpt:layers=2,hidden=64,heads=4,vocab=128"
"""The forms of a MODEL description, for error messages."""


class MeanSquareLoss(torch.nn.Module):
    """A model without a loss, wrapped with one: the mean square of its first output, or of the difference of two towers' embeddings.

    The embeddings of two towers (CLIP) are compared pair by pair. A loss over all pairs of a batch, like that of CLIP, would depend on how
    the batch is split.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss of a batch."""
        output = self.model(**batch)
        text, image = getattr(output, "text_embeds", None), getattr(output, "image_embeds", None)
        if isinstance(text, torch.Tensor) and isinstance(image, torch.Tensor):
            return (text.float() - image.float()).square().mean()
        return cast("torch.Tensor", output[0].float().square().mean())


# --- Hugging Face ---------------------------------------------------------------------------------


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence warnings and log messages of transformers in the body."""
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
    """Return the module transformers.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError.missing(
            "package transformers, which hf: models need", fix="Run: pip install 'autopar[hf]'"
        ) from error


def model_types() -> tuple[str, ...]:
    """Return the model types of transformers; none if it is not installed."""
    try:
        return tuple(_transformers().models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    except UsageError:
        return ()


def _meant(where: str) -> str:
    """Return what to write in place of ``hf:`` with something that is neither a model type nor a folder."""
    kind, colon, settings = where.partition(":")
    if not where:
        return "Write for example hf:llama, or hf:DIR"
    if where[0] in "./~":
        return "Check the path"
    if colon and kind in model_types():
        return f"Settings follow a question mark: 'hf:{kind}?{settings}'"
    if near := difflib.get_close_matches(where, model_types(), 5, 0.7):
        return f"Did you mean {', '.join(near)}?"
    return f"A model of the hub is given as a folder: run 'hf download {where} config.json --local-dir DIR' and write hf:DIR"


def hugging_face(text: str) -> tuple[Callable[[], torch.nn.Module], str]:
    """Return a function that makes the model of ``TYPE_OR_FOLDER?key=value&...``, and the name of its head.

    Raises:
        UsageError: the type or a key is unknown, or no model has these settings.
    """
    where, _, query = text.partition("?")
    given = _values(query, "&")
    transformers = _transformers()
    with quiet_transformers():
        if where and Path(where).is_dir():
            load = partial(_local_config, where)
        else:
            if where not in model_types():
                raise UsageError(
                    f"Unknown model type 'hf:{where}': neither a model type of transformers nor a folder with config.json",
                    fix=_meant(where),
                )
            load = partial(transformers.AutoConfig.for_model, where)
        config = _configured(load, given, where)
    return _maker_of(config)


def _local_config(where: str, **given: Any) -> Any:
    try:
        return _transformers().AutoConfig.from_pretrained(where, local_files_only=True, **given)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            "No usable config.json in this folder",
            where=where,
            got=str(error).splitlines()[0][:200],
            fix="Save the model with model.save_pretrained(DIR)",
        ) from error


def _configured(load: Callable[..., Any], given: Mapping[str, Any], where: str) -> Any:
    """Return the configuration with the overrides ``given``.

    Its class must declare their keys, the code of the model must read them, or they say the size of its images.

    Token ids outside the vocabulary are corrected. Layers are not dropped at random unless the overrides say so, as a trace cannot know
    which layers a step runs.

    Raises:
        UsageError: a key is unknown, or no model has these settings.
    """
    default = load()
    undeclared = [key for key in given if not hasattr(default, key)]
    optional = optional_keys(type(default)) | input_keys(default) if undeclared else frozenset()
    for key in undeclared:
        if key in optional:
            continue
        declared = {*default.to_dict(), *getattr(default, "attribute_map", {})} - {"transformers_version"}
        keys = sorted(declared | optional)
        near = difflib.get_close_matches(key, keys, 5, 0.5)
        raise UsageError(
            f"Unknown key '{key}' of the configuration of {where}",
            fix=(f"Did you mean {', '.join(near)}? " if near else "") + f"Known: {', '.join(keys)}",
        )
    names = getattr(default, "attribute_map", {})
    for one, other in combinations(given, 2):
        if names.get(one, one) == names.get(other, other):
            raise UsageError(f"'{one}' and '{other}' are one setting of {where}, given twice", fix="Keep one of them")
    try:
        config = load(**given)
    except Exception as error:  # a configuration checks itself, and raises errors of any library
        raise _unfit(error, where) from error
    for key in undeclared:  # from_pretrained drops such keys
        setattr(config, key, given[key])
    _check_sizes(config, given, where)
    _mend(config, given)
    return config


def _check_sizes(config: Any, given: Mapping[str, Any], where: str) -> None:
    """Check sizes with which a model has no layers or cannot run, and which configurations do not check themselves.

    Raises:
        UsageError: names the size.
    """
    layers, heads, kv_heads = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    if given and isinstance(layers, int) and layers < 1:
        raise UsageError(f"The model has {layers} layers", where=where, fix="Set num_hidden_layers to 1 or more")
    if given and isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        raise UsageError(
            f"{kv_heads} heads of keys and values do not divide {heads} attention heads",
            where=where,
            fix="Set num_key_value_heads to a divisor of num_attention_heads",
        )


def _mend(config: Any, given: Mapping[str, Any]) -> None:
    """Set keys to the values that training needs, which differ from those of published checkpoints, unless they are in ``given``."""
    config.use_cache = False
    if getattr(config, "architectures", None) is None:
        config.architectures = []  # transformers iterates over them if a type has several heads
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if name not in given and getattr(config, name, None):
            setattr(config, name, 0.0)
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, int) and token >= vocabulary and name not in given:
                setattr(config, name, None if name == "pad_token_id" else vocabulary - 1)
    words = getattr(getattr(config, "text_config", None), "vocab_size", None)
    for name in IMAGE_TOKENS:
        token = getattr(config, name, None)
        if isinstance(words, int) and isinstance(token, int) and token >= words and name not in given:
            setattr(config, name, words - 1)
    if getattr(config, "is_encoder_decoder", False):
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id


def _unfit(error: BaseException, where: str) -> UsageError:
    """Return the error for a configuration from which no model can be made; ``error`` is the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    value = f"{type(error).__name__}: {first[:200]}"
    if isinstance(error, ImportError):
        return UsageError(
            "The model needs a package that is not installed", where=where, got=value, fix="Install what it names"
        )
    fix = "Correct the keys after `?`, or give a factory `package.module:factory`"
    return UsageError("These settings make no model", where=where, got=value, fix=fix)


def _maker_of(config: Any) -> tuple[Callable[[], torch.nn.Module], str]:
    """Return a function that makes the model with a head that has a loss, and the name of the head; ``base`` if it has none.

    Raises:
        UsageError: transformers has no model of this type.
    """
    transformers = _transformers()
    auto = transformers.models.auto.modeling_auto
    kind = config.model_type
    mappings = (
        ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
        ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq"),
        ("masked", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
        ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
        ("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    )
    has_towers = hasattr(config, "text_config") and hasattr(config, "vision_config")
    for head, mapping, loader in mappings:
        if head == "image" and has_towers:  # the classifier has only one of them
            continue
        if kind in getattr(auto, mapping, {}):
            return partial(_make, getattr(transformers, loader), config, wrap=False), head
    has_places = any(getattr(config, name, None) is not None for name in IMAGE_TOKENS)
    if has_towers and has_places and kind in getattr(auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", {}):
        return partial(_make, transformers.AutoModelForImageTextToText, config, wrap=False), "image_text"
    if kind not in auto.MODEL_MAPPING_NAMES:
        raise UsageError.unsupported(
            f"The model type '{kind}'",
            instead="Give a factory `package.module:factory` that returns (model, example inputs)",
        )
    return partial(_make, transformers.AutoModel, config, wrap=True), "base"


def _make(loader: Any, config: Any, *, wrap: bool) -> torch.nn.Module:
    """Return the model with fused attention and grouped experts, or with as many of the two as its type supports.

    Args:
        wrap: whether the model has no loss and gets that of :class:`MeanSquareLoss`.
    """
    has_experts = hasattr(config, "num_local_experts") or hasattr(config, "num_experts")
    experts: list[dict[str, str]] = [_EXPERTS, {}] if has_experts else [{}]
    options = [{"attn_implementation": attention, **others} for attention in ("sdpa", "eager") for others in experts]
    for option in options:
        try:
            model = loader.from_config(copy.deepcopy(config), **option)  # it changes the config, even if it fails
        except FAILURES as error:  # no model has these settings, or an optional package of transformers is missing
            if option is options[-1] or not isinstance(error, ValueError | TypeError):
                raise _unfit(error, str(config.model_type)) from error
        else:
            return MeanSquareLoss(model) if wrap else cast("torch.nn.Module", model)
    raise AssertionError("the last option returns or raises")


_EXPERTS = {"experts_implementation": "grouped_mm"}
"""The only implementation of experts in transformers that exports without control flow on data and computes no unused expert."""


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
"""For each family the Hugging Face model type, and the keys of its configuration by our keys. All have ``dropout`` too (default 0).

MPT as trained by MosaicML (fused attention, exact GELU, learned positions) equals GPT-2 with PyTorch's fused operators. The MPT class of
Hugging Face stores all attention scores; ``hf:mpt`` is that one.
"""

_FIXED = {"mpt": {"activation_function": "gelu"}}
"""Further keys of a family's configuration."""

_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "llama": ("attention_dropout",),
    "mixtral": ("attention_dropout",),
}
"""The keys of a model type's configuration that ``dropout`` sets."""


def family_model(name: str, text: str, sequence_length: int | None) -> tuple[Callable[[], torch.nn.Module], str]:
    """Return a function that makes the model ``layers=2,hidden=64,...`` of a family, and the name of its head.

    Raises:
        UsageError: a key is unknown, or no model has these sizes.
    """
    kind, keys = FAMILIES[name]
    given = _values(text, ",")
    allowed = [*keys, "dropout"]
    for key, value in given.items():
        if key not in allowed:
            raise UsageError.unknown(f"{name} setting", key, allowed)
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
    return _maker_of(config)


def _values(text: str, separator: str) -> dict[str, Any]:
    """Return settings such as ``a=1&b=[2]`` as a dict. Values are read as JSON or as Python's ``True``, ``False``, ``None``, else as text.

    Raises:
        UsageError: a setting is not of the form key=value, is given twice, or is several settings with a wrong separator.
    """
    python = {"True": True, "False": False, "None": None}
    result: dict[str, Any] = {}
    for item in _split(text, separator):
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise UsageError(f"The setting '{item}' of the model is not of the form key=value", fix=GRAMMAR)
        if re.search(r"^[^\[{\"]*[,&;] *\w+=", value):
            raise UsageError(f"'{item}' is more than one setting of the model", fix=f"Separate them by '{separator}'")
        if re.fullmatch(r" *[\d.]+( *, *[\d.]+)+ *", value):
            raise UsageError(
                f"The setting '{item}' of the model is a list without brackets", fix=f"Write {key}=[{value}]"
            )
        key = key.strip()
        if key in result:
            raise UsageError(f"The setting '{key}' of the model is given twice", fix="Keep one of them")
        try:
            result[key] = json.loads(value)
        except json.JSONDecodeError:
            result[key] = python.get(value, value)
    return result


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators that are not in brackets, so that ``depths=[1,1]`` stays one part; empty parts are dropped."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{") - (c in "]}")
        if c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part for part in parts if part]


# --- keys that a configuration's class does not declare -------------------------------------------
# Released configurations have such keys (``head_dim`` of Qwen3-MoE). As an instance may lack such a key, the modelling code reads it by
# ``getattr(config, "head_dim", ...)`` or ``hasattr(config, "head_dim")``. These calls show which undeclared keys are valid. A plain
# ``config.head_dim`` does not: it belongs to a class that declares the key.

_OPTIONAL_READ = re.compile(r'\b(?:getattr|hasattr)\(\s*(?:self\.)?config,\s*"(\w+)"')


def optional_keys(config_class: type) -> frozenset[str]:
    """Return the keys that a configuration need not have: its modelling code reads them by getattr or hasattr.

    The source ``modeling_x.py`` beside ``configuration_x.py`` is searched, and not imported or run; without it there are no keys. There
    are none either if the configuration contains others (those of towers), as the code may read such a key of a contained one.
    """
    file = Path(getattr(sys.modules.get(config_class.__module__), "__file__", None) or "configuration_.py")
    source = file.with_name(file.name.replace("configuration_", "modeling_"))
    if source == file or not source.is_file() or getattr(config_class, "sub_configs", None):
        return frozenset()
    return frozenset(_OPTIONAL_READ.findall(source.read_text(encoding="utf-8")))
