"""Inputs of models by their configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autopar.errors import UsageError
from autopar.models.inputs import fields_of_config
from autopar.models.resolve import resolve_model, without_dropout


def test_a_wave_has_the_samples_that_the_convolutions_turn_into_the_sequence_length() -> None:
    config = SimpleNamespace(conv_kernel=[10, 3, 2], conv_stride=[5, 2, 2])
    (wave,) = fields_of_config(config, "base", "input_values", 7)
    x = torch.zeros(1, 1, *wave.shape)
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        x = torch.nn.functional.conv1d(x, torch.zeros(1, 1, kernel), stride=stride)
    assert x.shape[-1] == 7


def test_video_has_frames_and_a_spectrogram_its_own_order() -> None:
    video = SimpleNamespace(num_frames=3, num_channels=1, image_size=4, num_labels=5)
    pixels, labels = fields_of_config(video, "image", "pixel_values", None)
    assert (pixels.shape, labels.size) == ((3, 1, 4, 4), 5)
    spectrogram = SimpleNamespace(max_length=8, num_mel_bins=2, num_labels=5)
    assert fields_of_config(spectrogram, "base", "input_values", None)[0].shape == (8, 2)
    frames_first = SimpleNamespace(
        max_source_positions=6, input_feat_per_channel=4, input_channels=1, max_target_positions=9, vocab_size=11
    )
    sound, text = fields_of_config(frames_first, "speech", "input_features", None)
    assert (sound.shape, text.shape, text.size) == ((6, 4), (9,), 11)


def test_series_and_episodes_are_made_by_their_configuration() -> None:
    plain = SimpleNamespace(context_length=8, num_input_channels=3)
    assert [f.shape for f in fields_of_config(plain, "base", "past_values", None)] == [(8, 3)]
    decoded = SimpleNamespace(
        context_length=8, prediction_length=4, lags_sequence=[1, 3], input_size=1, num_time_features=2
    )
    fields = fields_of_config(decoded, "base", "past_values", None, ("past_values", "past_time_features"))
    assert {f.name: f.shape for f in fields} == {
        "past_values": (11,), "past_time_features": (11, 2), "past_observed_mask": (11,), "future_values": (4,),
        "future_time_features": (4, 2),
    }  # fmt: skip
    episode = SimpleNamespace(max_ep_len=30, n_positions=12, state_dim=5, act_dim=2)
    states, actions, *_, steps = fields_of_config(episode, "base", "states", None)
    assert (states.shape, actions.shape, steps.shape, steps.size) == ((4, 5), (4, 2), (4,), 30)


def test_a_model_of_text_that_takes_images_gets_them_unless_tokens_stand_for_their_parts() -> None:
    vision = SimpleNamespace(image_size=8)
    text = SimpleNamespace(vocab_size=9, max_position_embeddings=6, vision_config=vision)
    names = [f.name for f in fields_of_config(text, "causal", "input_ids", None, ("input_ids", "pixel_values"))]
    assert names == ["input_ids", "attention_mask", "pixel_values", "labels"]
    text.image_token_id = 8
    names = [f.name for f in fields_of_config(text, "causal", "input_ids", None, ("input_ids", "pixel_values"))]
    assert names == ["input_ids", "attention_mask", "labels"]
    with pytest.raises(UsageError, match=r"stand for the parts of an image.*Give a factory"):
        fields_of_config(text, "base", "input_ids", None)


@pytest.mark.parametrize("main_input", ["past_values", "input_features"])
def test_inputs_that_nobody_can_make_are_refused_with_a_remedy(main_input: str) -> None:
    with pytest.raises(UsageError, match=f"a model of {main_input}.*Give a factory"):
        fields_of_config(SimpleNamespace(), "base", main_input, None)


def test_layers_are_not_dropped_at_random_unless_asked_for() -> None:
    pytest.importorskip("transformers")
    sizes = "hf:m2m_100?encoder_layers=1&decoder_layers=1&d_model=8&encoder_attention_heads=2&decoder_attention_heads=2"
    sizes += "&vocab_size=16"
    source = resolve_model(sizes, sequence_length=4)
    assert source.model.config.encoder_layerdrop == 0.0
    asked = resolve_model(f"{sizes}&encoder_layerdrop=0.5", sequence_length=4)
    assert asked.model.config.encoder_layerdrop == 0.5


def test_without_dropout_drops_no_branches_either() -> None:
    model = torch.nn.Module()
    model.drop_prob, model.drop_path, model.attention_dropout, model.scale = 0.1, 0.2, 0.3, 0.4
    without_dropout(model)
    assert (model.drop_prob, model.drop_path, model.attention_dropout, model.scale) == (0.0, 0.0, 0.0, 0.4)


def test_modules_that_forward_makes_of_a_config_drop_nothing_either() -> None:
    """As BigBird makes another attention for short sequences."""
    model, config = (
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
        SimpleNamespace(attention_probs_dropout_prob=0.1, size=0.5),
    )
    model.config = model[0].config = config
    without_dropout(model)
    assert model.config is model[0].config
    assert vars(model.config) == {"attention_probs_dropout_prob": 0.0, "size": 0.5}
    assert config.attention_probs_dropout_prob == 0.1
