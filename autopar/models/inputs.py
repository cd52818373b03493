"""Batches for a model: a description of each input, and random valid values for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autopar.errors import UsageError

IGNORED = -100
"""The label that torch's losses ignore (their default ``ignore_index``)."""

LONGEST_DEFAULT = 2048
"""The sequence length in tokens if none is given and the model supports longer sequences."""

_WAVE_LENGTH = 16
"""The length of a waveform after the convolutions of an encoder, in positions, if no sequence length is given."""

PlaceCounter = Callable[[tuple[int, ...]], int]
"""Returns how many tokens of a model stand for an image [channels, height, width]."""

Kind = Literal["tokens", "labels", "masked_labels", "class", "floats", "mask", "sampled", "rows", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One input of a model.

    Attributes:
        name: the name of the argument of forward.
        shape: the shape of one sample.
        kind: which values it has. ``tokens``: ids below ``size``. ``labels``: a copy of the tokens, or random ids if these have another
            shape. ``masked_labels``: the same, but most labels of a copy are ignored. ``class``: a class below ``size``. ``floats``:
            normally distributed. ``mask``: 1 where a sample has tokens. ``sampled``: drawn from the elements of ``values``. ``rows``:
            samples of ``values``, in the same order for all such fields. ``constant``: always ``value``.
        size: the number of token ids or classes.
        image: the id of the token at the places of an image, and the number of these places, which stand behind the first token of a sample.
            Labels ignore them. Without places: (-1, 0).
        dtype: the dtype of the values.
        values: an example of the values, with the samples of the example batch.
        value: the value of a constant, which need not be a tensor.
        batched: whether the first dim counts samples; otherwise the shape is the same for every batch size.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    size: int = 0
    image: tuple[int, int] = (-1, 0)
    dtype: torch.dtype = torch.int64
    values: torch.Tensor | None = None
    value: bool | int | float | str | None = None
    batched: bool = True


def example_of(fields: tuple[Field, ...], batch_size: int) -> dict[str, Any]:
    """Return a batch with the values of a user's example and the constants; other tensors are on meta, and masks are left out."""
    batch: dict[str, Any] = {}
    for f in fields:
        shape = (batch_size, *f.shape) if f.batched else f.shape
        if f.kind == "constant":
            batch[f.name] = f.value
        elif f.values is not None and f.values.shape == shape:  # others are a few values to draw from
            batch[f.name] = f.values
        elif f.kind != "mask":
            batch[f.name] = torch.empty(shape, dtype=f.dtype, device="meta")
    return batch


def random_batch(
    fields: tuple[Field, ...], batch_size: int, generator: torch.Generator, *, padded: bool
) -> dict[str, Any]:
    """Return a batch of random valid values on the CPU.

    Args:
        padded: whether samples have different lengths. Labels behind the end of a sample are then ignored, and masks are part of the
            batch; otherwise there are no masks.
    """
    length = next((f.shape[0] for f in fields if f.kind == "tokens"), 0)
    lengths = torch.randint(max(length // 4, 1), length + 1, (batch_size,), generator=generator) if length else None
    beyond = torch.arange(length) >= lengths[:, None] if padded and lengths is not None else None
    batch: dict[str, Any] = {}
    tokens: torch.Tensor | None = None
    order: torch.Tensor | None = None
    for f in fields:
        shape = (batch_size, *f.shape) if f.batched else f.shape
        if f.kind == "mask":
            if beyond is not None:
                batch[f.name] = (~beyond).to(f.dtype)
            continue
        if f.kind == "constant":
            batch[f.name] = f.value
            continue
        if f.kind == "rows":
            assert f.values is not None
            order = order_of_samples(len(f.values), batch_size, generator) if order is None else order
            batch[f.name] = f.values[order]
            continue
        value = _values(f, shape, generator, tokens)
        if f.kind == "tokens" and tokens is None:
            tokens = value
        if beyond is not None and f.kind in ("labels", "masked_labels") and value.shape == beyond.shape:
            value[beyond] = IGNORED
        batch[f.name] = value
    return batch


def order_of_samples(size: int, batch_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return which of ``size`` example samples make up a batch: each is used equally often (up to one), in random order.

    Copies of a sample are next to each other. Ranks that split the batch then have different samples; otherwise each could have all of
    the few example samples.
    """
    return torch.randperm(size, generator=generator)[(torch.arange(batch_size) % size).sort().values]


def _values(f: Field, shape: tuple[int, ...], generator: torch.Generator, tokens: torch.Tensor | None) -> torch.Tensor:
    if f.kind == "floats":
        return torch.randn(shape, generator=generator).to(f.dtype)
    if f.kind == "sampled":
        assert f.values is not None
        pool = f.values.flatten()
        return pool[torch.randint(0, pool.numel(), shape, generator=generator)]
    if f.kind in ("labels", "masked_labels") and tokens is not None and tuple(tokens.shape) == shape:
        value = tokens.clone()
        value[value == f.image[0]] = IGNORED
        if f.kind == "masked_labels":
            hidden = torch.rand(shape, generator=generator) >= 0.15
            hidden[:, 0] = False
            value[hidden] = IGNORED
        return value
    value = torch.randint(0, f.size, shape, generator=generator, dtype=f.dtype)
    token, count = f.image
    if count:
        value[value == token] = (token + 1) % f.size
        value[:, 1 : count + 1] = token
    return value


def fields_of_examples(examples: Mapping[str, Any], batch_size: int) -> tuple[Field, ...]:
    """Return the fields of a user's example batch: its tensors and constants.

    Further batches consist of the example samples, whose fields may have to match each other. If all samples of a tensor are equal, as in
    a tensor of zeros, its floating-point values are drawn at random instead. Integers without samples are drawn from those in the example.
    """
    fields = []
    for name, value in examples.items():
        if isinstance(value, bool | int | float | str):
            fields.append(Field(name=name, shape=(), kind="constant", value=value, batched=False))
        if not isinstance(value, torch.Tensor):
            continue
        batched = value.dim() > 0 and value.shape[0] == batch_size
        shape = tuple(value.shape[1:]) if batched else tuple(value.shape)
        is_float = value.is_floating_point()
        data = None if value.device.type == "meta" else value.detach().cpu()
        is_row = batched and data is not None and not (is_float and torch.equal(data, data[:1].expand_as(data)))
        kind: Kind = "rows" if is_row else "floats" if is_float else "sampled" if data is not None else "class"
        fields.append(Field(name=name, shape=shape, kind=kind, size=2, dtype=value.dtype, values=data, batched=batched))
    return tuple(fields)


def fields_of_config(
    config: Any,
    head: str,
    main_input: str,
    sequence_length: int | None,
    takes: Collection[str] = (),
    count_places: PlaceCounter | None = None,
) -> tuple[Field, ...]:
    """Return the inputs of a Hugging Face model with the given head.

    Args:
        head: causal, masked, seq2seq, speech, image, image_text or base.
        main_input: ``model.main_input_name``.
        sequence_length: tokens of a sample; None for the default of the model.
        takes: the names of the parameters of the model's forward.
        count_places: returns how many places an image of a shape takes among the tokens of a sample; for the head image_text.

    Raises:
        UsageError: inputs of this modality cannot be made, or a sequence has no room for an image.
    """
    try:
        if head == "image_text" and count_places is not None:
            return _image_text_fields(config, sequence_length, takes, count_places)
        if main_input == "pixel_values":
            return _image_fields(config, head)
        if main_input in ("input_features", "input_values"):
            return _speech_fields(config, head, main_input, sequence_length)
        if main_input == "input_ids":
            return _token_fields(config, head, sequence_length, takes)
        if main_input == "past_values":
            return _series_fields(config, takes)
        if main_input == "states":
            return _decision_fields(config, sequence_length)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise _unknown_inputs(f"{main_input}, of a size that its configuration does not tell ({error})") from error
    raise _unknown_inputs(main_input)


def _unknown_inputs(value: str) -> UsageError:
    return UsageError(
        f"Cannot make random inputs for a model of {value}",
        fix="Give a factory `package.module:factory` that returns (model, example inputs)",
    )


IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Keys of a configuration that name the token at whose places the parts of an image stand."""

IMAGE_SIZE = "image_size"
"""The key of a configuration that says the height and width of images; 224 without it."""

_FAIL_WITHOUT_MASK = ("longt5", "switch_transformers")
"""Model types that fail without a mask, although it is optional: their code in transformers 5.23 reads the batch size from it."""


def _token_fields(config: Any, head: str, sequence_length: int | None, takes: Collection[str]) -> tuple[Field, ...]:
    """Return the fields of a model of tokens, with images if its forward takes some."""
    text_config = getattr(config, "get_text_config", lambda: config)()
    vocabulary = int(getattr(text_config, "vocab_size", 0) or 0)
    if not vocabulary:
        raise _unknown_inputs("tokens of a vocabulary whose size its configuration does not tell")
    length = sequence_length or default_length(text_config)
    tokens = Field(name="input_ids", shape=(length,), kind="tokens", size=vocabulary)
    mask = Field(name="attention_mask", shape=(length,), kind="mask")
    if getattr(config, "model_type", "") in _FAIL_WITHOUT_MASK:
        mask = replace(mask, kind="sampled", values=torch.ones(1, dtype=torch.int64))
    vision = getattr(config, "vision_config", None) or config
    has_image_tokens = any(getattr(config, name, None) is not None for name in IMAGE_TOKENS)
    if head == "base":
        if hasattr(vision, "image_size") and (vision is not config or "pixel_values" in takes):
            if has_image_tokens:
                raise _unknown_inputs("tokens some of which stand for the parts of an image")
            return (tokens, mask, *_image_fields(vision, head))
        decoder_ids = (Field(name="decoder_input_ids", shape=(length,), kind="class", size=vocabulary),)
        return (tokens, mask, *(decoder_ids if getattr(config, "is_encoder_decoder", False) else ()))
    labels = Field(
        name="labels", shape=(length,), kind="masked_labels" if head == "masked" else "labels", size=vocabulary
    )
    if "pixel_values" in takes and hasattr(vision, "image_size") and not has_image_tokens:
        return (tokens, mask, *_image_fields(vision, "base"), labels)
    return tokens, mask, labels


def _image_text_fields(
    config: Any, sequence_length: int | None, takes: Collection[str], count_places: PlaceCounter
) -> tuple[Field, ...]:
    """Return the fields of a model of images and text: one image a sample, whose parts stand at the places of one token."""
    text_config = config.get_text_config()
    length, size = sequence_length or default_length(text_config), int(text_config.vocab_size)
    (pixels,) = _image_fields(config.vision_config, "base")
    count = count_places(pixels.shape)
    if count + 2 > length:
        raise UsageError(
            f"A sequence of {length} tokens has no room for the {count} places of an image and for text",
            fix=f"Give a longer one (--seq {count + 2} or more)",
        )
    token = next(config.to_dict()[name] for name in IMAGE_TOKENS if name in config.to_dict())
    tokens = Field(name="input_ids", shape=(length,), kind="tokens", size=size, image=(int(token), count))
    types = Field(name="token_type_ids", shape=(length,), kind="class", size=2)
    mask = Field(name="attention_mask", shape=(length,), kind="mask")
    labels = replace(tokens, name="labels", kind="labels")
    return (tokens, mask, *((types,) if types.name in takes else ()), pixels, labels)


def _floats(name: str, *shape: int) -> Field:
    return Field(name=name, shape=shape, kind="floats", dtype=torch.float32)


def _series_fields(config: Any, takes: Collection[str]) -> tuple[Field, ...]:
    """Return the past of a time series, and its future if the model decodes one; all values are observed and have time features."""
    context = int(config.context_length)
    if "past_time_features" not in takes:
        return (_floats("past_values", context, int(config.num_input_channels)),)
    past, future = context + max(int(lag) for lag in config.lags_sequence), int(config.prediction_length)
    width = () if int(config.input_size) == 1 else (int(config.input_size),)
    features = int(config.num_time_features)
    observed = Field(
        name="past_observed_mask", shape=(past, *width), kind="sampled", dtype=torch.float32, values=torch.ones(1)
    )
    return (
        _floats("past_values", past, *width),
        _floats("past_time_features", past, features),
        observed,
        _floats("future_values", future, *width),
        _floats("future_time_features", future, features),
    )


def _decision_fields(config: Any, sequence_length: int | None) -> tuple[Field, ...]:
    """Return the fields of episodes: states, actions and rewards by time."""
    length = sequence_length or min(int(config.max_ep_len), int(config.n_positions) // 3)
    return (
        _floats("states", length, int(config.state_dim)),
        _floats("actions", length, int(config.act_dim)),
        _floats("rewards", length, 1),
        _floats("returns_to_go", length, 1),
        Field(name="timesteps", shape=(length,), kind="class", size=int(config.max_ep_len)),
    )


def default_length(config: Any) -> int:
    """Return the longest sequence of a model in tokens, at most :data:`LONGEST_DEFAULT`; 512 if its config does not say."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"):
        longest = getattr(config, name, None)
        if isinstance(longest, int) and longest > 0:
            return min(longest, LONGEST_DEFAULT)
    return 512


def input_keys(config: Any) -> frozenset[str]:
    """Return the keys of a configuration that say nothing but the shape of inputs, and need not be declared.

    A model of images may take any size, and then does not declare one: SegFormer, ResNet.
    """
    return frozenset([IMAGE_SIZE]) if hasattr(config, "num_channels") else frozenset()


def _image_fields(config: Any, head: str) -> tuple[Field, ...]:
    size = getattr(config, IMAGE_SIZE, 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    frames = getattr(config, "num_frames", None)
    channels = int(getattr(config, "num_channels", 3))
    pixels = _floats("pixel_values", *((int(frames),) if frames else ()), channels, int(height), int(width))
    if head != "image":
        return (pixels,)
    return pixels, _class_label(config)


def _class_label(config: Any) -> Field:
    return Field(name="labels", shape=(), kind="class", size=int(getattr(config, "num_labels", 2)))


def _speech_fields(config: Any, head: str, main_input: str, sequence_length: int | None) -> tuple[Field, ...]:
    """Return the fields of a model of sound, with labels if its head generates text or classifies.

    A spectrogram of ``input_features`` has two frames for each position, as the encoder halves them, if its config has mel bins. A waveform
    has as many samples as give the sequence length (:data:`_WAVE_LENGTH` if None) after the convolutions of the encoder.
    """
    labels: tuple[Field, ...] = ()
    if head == "speech":
        longest = getattr(config, "max_target_positions", None) or config.max_text_positions
        length = sequence_length or min(int(longest), LONGEST_DEFAULT)
        labels = (Field(name="labels", shape=(length,), kind="class", size=int(config.vocab_size)),)
    if main_input == "input_values" and not hasattr(config, "conv_kernel"):  # a spectrogram that is used like an image
        shape: tuple[int, ...] = (int(config.max_length), int(config.num_mel_bins))
        if head == "image":
            labels = (_class_label(config),)
    elif main_input == "input_values":
        samples = sequence_length or _WAVE_LENGTH
        for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
            samples = (samples - 1) * int(stride) + int(kernel)
        shape = (samples,)
    elif hasattr(config, "num_mel_bins"):
        shape = (int(config.num_mel_bins), 2 * int(config.max_source_positions))
    else:
        shape = (int(config.max_source_positions), int(config.input_feat_per_channel) * int(config.input_channels))
    return _floats(main_input, *shape), *labels
