import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from autopar.errors import UsageError
from autopar.models.inputs import example_of, fields_of_config, fields_of_examples, random_batch
from autopar.models.resolve import example_batch_for, resolve_model
from autopar.models.specs import MeanSquareLoss, optional_keys
from autopar.ops.opaque import without_dropout
from tests.support.said import refuses

GPT = "gpt:layers=2,hidden=32,heads=4,vocab=64"
SIZES = "num_hidden_layers=1&hidden_size=32&num_attention_heads=4&vocab_size=64"


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (GPT, 64 * 32 + 8 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32),
        ("llama:layers=2,hidden=32,heads=4,kv_heads=2,ffn=64,vocab=64",
         2 * 64 * 32 + 2 * (3 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32),
        ("llama:layers=2,hidden=32,heads=4,ffn=64,vocab=64,tied=1",
         64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32),
        ("llama:layers=2,hidden=32,heads=4,ffn=64,vocab=64,tied=False",
         2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32),
        ("mpt:layers=2,hidden=32,heads=4,vocab=64", 64 * 32 + 8 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32),
        ("bloom:layers=2,hidden=32,heads=4,vocab=64", 64 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 4 * 32),
        ("mixtral:layers=1,hidden=32,heads=4,kv_heads=2,ffn=64,vocab=64,experts=4,top_k=2",
         2 * 64 * 32 + 3 * 32 * 32 + 4 * 3 * 32 * 64 + 4 * 32 + 3 * 32),
    ],
)  # fmt: skip
def test_families_have_the_sizes_they_are_given_and_live_on_meta(spec: str, parameters: int) -> None:
    source = resolve_model(spec, sequence_length=8)
    assert sum(p.numel() for p in source.model.parameters()) == parameters
    assert all(p.is_meta for p in source.model.parameters())
    assert {n: t.shape for n, t in source.example_inputs.items()} == {"input_ids": (2, 8), "labels": (2, 8)}
    assert all(t.is_meta for t in source.example_inputs.values())


def test_settings_after_the_question_mark_are_json_where_they_can_be() -> None:
    llama = resolve_model(
        f"hf:llama?{SIZES}&intermediate_size=64&tie_word_embeddings=true&hidden_act=gelu"
    ).model.config
    assert (llama.tie_word_embeddings, llama.hidden_act, llama.num_hidden_layers) == (True, "gelu", 1)
    falcon = resolve_model(f"hf:falcon?{SIZES}&multi_query=False")
    assert falcon.model.config.multi_query is False, "as Python writes it"
    swin = resolve_model("hf:swin?depths=[1,1]&num_heads=[2,2]&embed_dim=16&image_size=32&window_size=2")
    assert swin.model.config.depths == [1, 1]


def test_keys_are_taken_that_the_code_asks_for_although_the_class_of_the_configuration_lacks_them() -> None:
    """Published configurations have them: head_dim of Qwen3-MoE, whose heads are wider than hidden / heads."""
    moe = resolve_model(f"hf:qwen3_moe?{SIZES}&head_dim=16&num_experts=4&moe_intermediate_size=32")
    assert moe.model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (4 * 16, 32)
    deberta = resolve_model(f"hf:deberta-v2?{SIZES}&relative_attention=true&position_buckets=4")
    assert deberta.model.get_parameter("deberta.encoder.rel_embeddings.weight").shape == (2 * 4, 32)


def test_images_have_the_size_that_is_given_also_of_models_that_take_any(tmp_path: Path) -> None:
    transformers.ResNetConfig(depths=[1], hidden_sizes=[8], embedding_size=8, layer_type="basic").save_pretrained(
        tmp_path
    )
    for where in ("hf:resnet?depths=[1]&hidden_sizes=[8]&embedding_size=8&layer_type=basic&", f"hf:{tmp_path}?"):
        for size, shape in (("32", (32, 32)), ("[32,64]", (32, 64))):
            made = resolve_model(f"{where}image_size={size}").example_inputs
            assert made["pixel_values"].shape == (2, 3, *shape)


def test_examples_have_the_batch_and_the_length_of_masks_that_a_model_cannot_do_without() -> None:
    switch = "hf:switch_transformers?d_model=32&d_kv=8&d_ff=64&num_layers=2&num_decoder_layers=2&num_heads=4&num_experts=2&vocab_size=64"
    assert resolve_model(switch, sequence_length=8).example_inputs["attention_mask"].shape == (2, 8)
    series = "hf:time_series_transformer?prediction_length=4&context_length=8&lags_sequence=[1,2]&d_model=16"
    assert resolve_model(series).example_inputs["past_observed_mask"].shape == (2, 8 + 2)


MODELLING = """
def rotary(config: "OwnConfig | None" = None):
    return getattr(config, "by_function", 1)

class Own:
    def __init__(self, config: OwnConfig, layer):
        self.config = config
        self.a = getattr(config, "by_parameter", None) or config.declared
        if hasattr(config, "looked_for"):
            self.b = config.looked_for

    def forward(self, other, *, x=getattr(other, "of_another_object", 0)):
        return getattr(self.config, "by_attribute", x)

class Older:
    def __init__(self, config):
        self.a = getattr(
            config, "on_a_line_of_its_own", None
        )
"""


@pytest.mark.parametrize("towers", [False, True])
def test_keys_that_code_asks_for_are_read_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, towers: bool) -> None:
    (tmp_path / "modeling_own.py").write_text(MODELLING + "raise AssertionError('this is not run')\n")
    for name in ("configuration_own", "configuration_alone"):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
    made = type("OwnConfig", (), {"__module__": "configuration_own", "sub_configs": {"tower": 0} if towers else {}})
    expected = {"by_function", "by_parameter", "looked_for", "by_attribute", "on_a_line_of_its_own"}
    assert optional_keys(made) == (frozenset() if towers else expected), "they may be keys of a tower"
    assert optional_keys(type("Alone", (), {"__module__": "configuration_alone"})) == frozenset()
    assert optional_keys(Path) == frozenset()


def test_a_model_without_a_head_has_the_mean_square_as_loss() -> None:
    source = resolve_model(f"hf:clip_text_model?{SIZES}")
    assert isinstance(source.model, MeanSquareLoss) and set(source.example_inputs) == {"input_ids"}
    loss = source.build()(**source.make_batch(2))
    assert loss.dim() == 0 and loss.isfinite()


def test_batches_are_valid_repeatable_and_padded_on_request() -> None:
    source = resolve_model(GPT, sequence_length=16)
    plain, again, other = (source.make_batch(3, seed=s) for s in (1, 1, 2))
    assert set(plain) == {"input_ids", "labels"}
    assert torch.equal(plain["input_ids"], again["input_ids"])
    assert not torch.equal(plain["input_ids"], other["input_ids"])
    assert plain["input_ids"].min() >= 0 and plain["input_ids"].max() < 64

    padded = source.make_batch(8, seed=1, padded=True)
    assert set(padded) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(padded["labels"] == -100, padded["attention_mask"] == 0)
    assert len(set(padded["attention_mask"].sum(dim=1).tolist())) > 1, "lengths differ"
    assert (padded["attention_mask"][:, 0] == 1).all()
    made = example_batch_for(resolve_model(GPT, sequence_length=8).model)
    assert {n: tuple(t.shape) for n, t in made.items()} == {"input_ids": (2, 8), "labels": (2, 8)}


def test_built_models_are_equal_for_equal_seeds_and_have_no_dropout() -> None:
    source = resolve_model(GPT + ",dropout=0.5", sequence_length=8)
    one, two, three = source.build(1), source.build(1), source.build(2)
    batch = source.make_batch(2)
    assert one.training
    assert torch.equal(one(**batch).loss, one(**batch).loss)
    assert torch.equal(one(**batch).loss, two(**batch).loss)
    assert not torch.equal(one(**batch).loss, three(**batch).loss)


def test_a_source_travels_to_other_processes_by_its_description() -> None:
    source = resolve_model(GPT, sequence_length=8, batch_size=4, dtype=torch.bfloat16)
    sent = pickle.dumps(source)
    assert len(sent) < 2000
    again = pickle.loads(sent)
    assert (again.name, again.batch_size, again.dtype) == (GPT, 4, torch.bfloat16)
    assert again.example_inputs["labels"].shape == (4, 8)


FACTORY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.rand(4)))

    def forward(self, x, y, scale=True):
        return torch.nn.functional.cross_entropy(self.dropout(self.linear(x)), y)

def with_inputs():
    return Net(), {"x": torch.randn(4, 4), "y": torch.tensor([0, 1, 2, 0])}

def that_fits():
    return Net(), {"x": torch.arange(8.0)[:, None].expand(8, 4), "y": torch.arange(8) % 3, "scale": False}

def with_tuple():
    return Net(), (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))

def with_list():
    return Net(), list(with_tuple()[1])

text = "text"
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_factories.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_factories", raising=False)
    return "own_factories"


@pytest.mark.parametrize("name", ["with_inputs", "with_tuple", "with_list"])
def test_a_factory_gives_model_and_inputs(factories: str, name: str) -> None:
    source = resolve_model(f"{factories}:{name}")
    assert {n: tuple(t.shape) for n, t in source.example_inputs.items()} == {"x": (4, 4), "y": (4,)}
    batch = source.make_batch(6, seed=3)
    assert batch["x"].shape == (6, 4) and set(batch["y"].tolist()) <= {0, 1, 2}
    graph = source.trace()
    assert graph.num_parameters == 15
    built = source.build(1)
    assert torch.equal(built(**batch), built(**batch)), "no dropout"


def test_batches_of_a_factory_are_made_of_its_samples(factories: str) -> None:
    source = resolve_model(f"{factories}:that_fits")
    batch = source.make_batch(16, seed=1)
    assert torch.equal(batch["y"], batch["x"][:, 0].long() % 3), "what fits together stays together"
    assert batch["x"][:8, 0].tolist() != batch["x"][8:, 0].tolist(), "ranks have other samples"
    assert sorted(batch["x"][:, 0].tolist()) == [i // 2 for i in range(16)]
    assert batch["scale"] is False
    assert source.build().turns.is_complex()
    # a graph keeps values of constant buffers: ranks and the one device that they are compared with have the same
    state = torch.get_rng_state()
    again = resolve_model(f"{factories}:that_fits")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again.model.turns, source.model.turns)
    assert torch.equal(source.build().turns, source.model.turns)
    assert source.trace().num_parameters == 15


def test_samples_that_are_equal_stay_whole_and_a_trace_gets_the_values_of_a_factory() -> None:
    """The rows of image grids mean something only as they are, and a model that is run whole accepts no random ones."""
    given = {"grid": torch.tensor([[1, 4, 6]] * 4), "x": torch.randn(4, 2)}
    fields = fields_of_examples(given, 4)
    made = random_batch(fields, 8, torch.Generator().manual_seed(0), padded=False)
    assert made["grid"].tolist() == [[1, 4, 6]] * 8
    assert all(torch.equal(value, given[name]) for name, value in example_of(fields, 4).items())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("own_factories:text", "cannot be called"),
        ("gpt2", "Did you mean 'gpt'.* or hf:gpt2"),
        ("mine/Llama-8B", "Unknown kind of model.* or hf:DIR with its config.json"),
        ("hf:mine/Llama-8B", "as a folder: run 'hf download mine/Llama-8B config.json --local-dir DIR'"),
        ("hf:", "Write for example hf:llama"),
        ("hf:./nosuch", "nor a folder with config.json. Check the path"),
        ("hf:gpt2:n_layer=2", r"Settings follow a question mark: 'hf:gpt2\?n_layer=2'"),
        ("hf:resnet?depths=1,2", r"'depths=1,2' of the model is a list without brackets. Write depths=\[1,2\]"),
        ("hf:gpt2?n_layr=2", "Did you mean n_layer.*Known: "),
        ("hf:qwen3_moe?head_dims=16", "Did you mean head_dim.*Known: .*head_dim"),
        ("hf:bert?image_size=32", "Unknown key 'image_size' of the configuration of bert"),
        ("hf:clip?head_dim=16", "Unknown key 'head_dim' of the configuration of clip"),
        ("hf:gpt2?n_layer", "key=value"),
        ("gpt:layers=2&hidden=32", "more than one setting.*Separate them by ','"),
        ("gpt:layers=2,hidden=32, layers=3", "'layers' of the model is given twice.*Keep one"),
        ("hf:gpt2?n_layer=2&n_layer=2", "'n_layer' of the model is given twice.*Keep one"),
        ("hf:gpt2?n_embd=30&n_head=4", "settings make no model"),
        ("hf:canine?num_hidden_layers=1", "a vocabulary whose size its configuration does not tell. Give a factory"),
        ("hf:upernet", "'upernet' is not supported. Give a factory"),
        ("hf:llava_next?image_token_index=9", "LlavaNext.*Cannot make random images.*'image_sizes'. Give a factory"),
        ("gpt:layers=two", "whole number"),
        ("gpt:layers=-1", "gpt:layers is -1, which is below 1"),
        ("gpt:seq=0", "gpt:seq is 0, which is below 1"),
        ("gpt:dropout=nan", "These settings make no model"),
        ("llama:kv_heads=3", "3 heads of keys and values do not divide 32 attention heads"),
        ("hf:gpt2?n_layer=-2", "The model has -2 layers"),
        ("hf:gpt2?n_layer=x", "Field 'n_layer' expected int, got str"),
        ("gpt:hidden=30,heads=4", "does not divide by 4 heads"),
    ],
)
def test_bad_descriptions_have_one_clear_message(factories: str, spec: str, says: str) -> None:
    refuses(UsageError, says, resolve_model, spec)


def test_a_sequence_beyond_the_models_positions_is_refused() -> None:
    gpt2 = "hf:gpt2?n_layer=1&n_embd=32&n_head=4&vocab_size=64"
    refuses(UsageError, "1024 positions", resolve_model, gpt2, sequence_length=2048)
    assert resolve_model(GPT, sequence_length=2048).example_inputs["labels"].shape == (2, 2048), "families grow"


def test_a_package_that_a_model_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise ImportError("\nTimmBackbone requires the timm library\n`pip install timm`\n")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lacks)
    said = "package that is not installed: .*requires the timm library.*Install"
    refuses(UsageError, said, resolve_model, "hf:gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refuses(UsageError, "pip install", resolve_model, "hf:gpt2")


def test_a_wave_has_the_samples_that_the_convolutions_turn_into_the_sequence_length() -> None:
    config = SimpleNamespace(conv_kernel=[10, 3, 2], conv_stride=[5, 2, 2])
    (wave,) = fields_of_config(config, "base", "input_values", 7)
    x = torch.zeros(1, 1, *wave.shape)
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        x = torch.nn.functional.conv1d(x, torch.zeros(1, 1, kernel), stride=stride)
    assert x.shape[-1] == 7


SOUND = {"max_source_positions": 6, "input_feat_per_channel": 4, "input_channels": 1, "max_target_positions": 9}
SERIES = {"context_length": 8, "prediction_length": 4, "lags_sequence": [1, 3], "input_size": 1, "num_time_features": 2}
TEXT = {"vocab_size": 9, "max_position_embeddings": 6, "vision_config": SimpleNamespace(image_size=8)}
FIELDS = {
    "a video has frames": (
        {"num_frames": 3, "num_channels": 1, "image_size": 4, "num_labels": 5}, "image", ("pixel_values",),
        [("pixel_values", (3, 1, 4, 4), 0), ("labels", (), 5)]),
    "a spectrogram has its own order": (
        {"max_length": 8, "num_mel_bins": 2, "num_labels": 5}, "base", ("input_values",),
        [("input_values", (8, 2), 0)]),
    "frames of sound are first": (
        {**SOUND, "vocab_size": 11}, "speech", ("input_features",),
        [("input_features", (6, 4), 0), ("labels", (9,), 11)]),
    "a series": (
        {"context_length": 8, "num_input_channels": 3}, "base", ("past_values",), [("past_values", (8, 3), 0)]),
    "a series that is decoded": (
        SERIES, "base", ("past_values", "past_time_features"),
        [("past_values", (11,), 0), ("past_time_features", (11, 2), 0), ("past_observed_mask", (11,), 0),
         ("future_values", (4,), 0), ("future_time_features", (4, 2), 0)]),
    "episodes": (
        {"max_ep_len": 30, "n_positions": 12, "state_dim": 5, "act_dim": 2}, "base", ("states",),
        [("states", (4, 5), 0), ("actions", (4, 2), 0), ("rewards", (4, 1), 0), ("returns_to_go", (4, 1), 0),
         ("timesteps", (4,), 30)]),
    "a model of text that takes images": (
        TEXT, "causal", ("input_ids", "pixel_values"),
        [("input_ids", (6,), 9), ("attention_mask", (6,), 0), ("pixel_values", (3, 8, 8), 0), ("labels", (6,), 9)]),
    "no images where tokens stand for their parts": (
        {**TEXT, "image_token_id": 8}, "causal", ("input_ids", "pixel_values"),
        [("input_ids", (6,), 9), ("attention_mask", (6,), 0), ("labels", (6,), 9)]),
}  # fmt: skip
"""Configurations, heads and inputs of which the first is the main one; names, shapes and numbers of classes."""


@pytest.mark.parametrize(("config", "head", "takes", "fields"), FIELDS.values(), ids=FIELDS)
def test_inputs_are_made_by_their_configuration(config: Any, head: str, takes: tuple[str, ...], fields: Any) -> None:
    made = fields_of_config(SimpleNamespace(**config), head, takes[0], None, takes if len(takes) > 1 else ())
    assert [(field.name, field.shape, field.size) for field in made] == fields


@pytest.mark.parametrize(("config", "main_input", "said"), [
    ({}, "past_values", "a model of past_values.*Give a factory"),
    ({}, "input_features", "a model of input_features.*Give a factory"),
    ({**TEXT, "image_token_id": 8}, "input_ids", "stand for the parts of an image.*Give a factory"),
])  # fmt: skip
def test_inputs_that_nobody_can_make_are_refused_with_a_remedy(config: Any, main_input: str, said: str) -> None:
    refuses(UsageError, said, fields_of_config, SimpleNamespace(**config), "base", main_input, None)


def test_images_take_as_many_places_among_the_tokens_as_they_have_parts() -> None:
    sizes = '"num_hidden_layers":1,"hidden_size":8,"num_attention_heads":2,"intermediate_size":8'
    spec = f'hf:llava?text_config={{"model_type":"llama",{sizes},"vocab_size":12}}&image_token_index=9'
    spec += f'&vision_config={{"model_type":"clip_vision_model",{sizes},"image_size":8,"patch_size":4}}'
    source = resolve_model(spec, sequence_length=8)
    batch = source.make_batch(6, padded=True)
    assert set(batch) == {"input_ids", "attention_mask", "pixel_values", "labels"}
    assert ((batch["input_ids"] == 9) == torch.tensor([0, 1, 1, 1, 1, 0, 0, 0])).all() and (batch["labels"] != 9).all()
    assert source.build()(**batch).loss.isfinite()
    graph = source.trace()
    assert not graph.notes or "samples meet" not in " ".join(graph.notes)
    assert [op.target for op in graph.ops if "masked_scatter" in op.target] == ["autopar.masked_scatter_by_sample"]
    refuses(UsageError, "no room for the 4 places of an image.*--seq 6", resolve_model, spec, sequence_length=5)


def test_layers_are_not_dropped_at_random_unless_asked_for() -> None:
    sizes = "hf:m2m_100?encoder_layers=1&decoder_layers=1&d_model=8&encoder_attention_heads=2&decoder_attention_heads=2"
    sizes += "&vocab_size=16"
    source = resolve_model(sizes, sequence_length=4)
    assert source.model.config.encoder_layerdrop == 0.0
    asked = resolve_model(f"{sizes}&encoder_layerdrop=0.5", sequence_length=4)
    assert asked.model.config.encoder_layerdrop == 0.5


def test_without_dropout_neither_branches_are_dropped_nor_what_forward_makes_of_a_config() -> None:
    """As BigBird makes another attention for short sequences."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    config = SimpleNamespace(attention_probs_dropout_prob=0.1, size=0.5)
    model.config = model[0].config = config
    model.drop_prob, model.drop_path, model.attention_dropout, model.scale = 0.1, 0.2, 0.3, 0.4
    without_dropout(model)
    assert (model.drop_prob, model.drop_path, model.attention_dropout, model.scale) == (0.0, 0.0, 0.0, 0.4)
    assert model.config is model[0].config
    assert vars(model.config) == {"attention_probs_dropout_prob": 0.0, "size": 0.5}
    assert config.attention_probs_dropout_prob == 0.1
