"""Small models with valid batches, without dropout."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model
from autopar.tracing.trace import trace
from tests.support.small_models import model_of

SMALL = "hidden_size=32&num_attention_heads=4&vocab_size=96&intermediate_size=64"
HUGGING_FACE = {
    "gpt2": "hf:gpt2?n_embd=32&n_head=4&vocab_size=96",
    "llama": f"hf:llama?{SMALL}&num_key_value_heads=2",
    "llama_tied": f"hf:llama?{SMALL}&num_key_value_heads=2&tie_word_embeddings=true",
    "mistral": f"hf:mistral?{SMALL}&num_key_value_heads=2",
    "qwen3": f"hf:qwen3?{SMALL}&num_key_value_heads=2&head_dim=8",
    "phi3": f"hf:phi3?{SMALL}&num_key_value_heads=2&pad_token_id=0",
    "bert": f"hf:bert?{SMALL}",
    "vit": "hf:vit?hidden_size=32&num_attention_heads=4&intermediate_size=64&image_size=16&patch_size=4&num_labels=4",
    "t5": "hf:t5?d_model=32&num_heads=4&d_kv=8&d_ff=64&vocab_size=96",
}
LENGTH = 16


def description(kind: str, layers: int = 2) -> str:
    """MODEL, of a Hugging Face model with so many layers."""
    key = {"gpt2": "n_layer", "t5": "num_layers"}.get(kind, "num_hidden_layers")
    return f"{HUGGING_FACE[kind]}&{key}={layers}"


def _mlp(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Unrolled by hand, under names without numbers."""
    x = self.stem(x)
    for layer in (self.red, self.green, self.blue, self.grey):
        x = F.relu(layer(x))
    return F.cross_entropy(self.out(x), y)


def _encoder(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = self.out(self.layers(self.table(x)))
    return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), y.flatten())}


def encoder(depth: int) -> nn.Module:
    """PyTorch's own layers, whose attention projects in one product."""
    layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(depth))
    parts = {"layers": nn.Sequential(*layers), "out": nn.Linear(32, 96)}
    return model_of(_encoder, table=nn.Embedding(96, 32), **parts)


class Handwritten(nn.Module):
    """nanoGPT's way: a buffer of masks, scores computed in the open, a tied head."""

    def __init__(self, depth: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(96, width), nn.Embedding(LENGTH, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 96, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("triangle", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = x.shape
        h = self.tokens(x) * 0.1 + self.places(torch.arange(length, device=x.device))
        for norm, projection, out in zip(self.norms, self.projections, self.outs, strict=True):
            q, k, v = projection(norm(h)).split(h.shape[-1], dim=2)
            q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            scores = scores.masked_fill(self.triangle[:, :, :length, :length] == 0, float("-inf"))
            mixed = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(batch, length, -1)
            h = h + out(mixed)
        logits = self.head(h)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


def subject(kind: str, *, padded: bool = False, layers: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model on CPU with random weights, and a batch of two."""
    if kind in HUGGING_FACE:
        source = resolve_model(description(kind, layers), sequence_length=None if kind == "vit" else LENGTH)
        return source.build(seed=1), source.make_batch(2, seed=2, padded=padded)
    torch.manual_seed(1)
    if kind == "mlp":
        inner = {name: nn.Linear(12, 12) for name in ("red", "green", "blue", "grey")}
        model = model_of(_mlp, stem=nn.Linear(6, 12), **inner, out=nn.Linear(12, 5))
        return model, {"x": torch.randn(2, 6), "y": torch.tensor([0, 4])}
    model = encoder(layers) if kind == "encoder" else Handwritten(layers)
    generator = torch.Generator().manual_seed(0)
    return model, {name: torch.randint(0, 96, (2, LENGTH), generator=generator) for name in ("x", "y")}


@cache
def _traced(kind: str, padded: bool, layers: int) -> Graph:
    model, batch = subject(kind, padded=padded, layers=layers)
    return trace(model, (), batch)


def traced(kind: str, padded: bool = False, layers: int = 2) -> Graph:
    """The graph of :func:`subject`, which whoever asks for it only reads."""
    return _traced(kind, padded, layers)


@cache
def traced_on_meta(kind: str) -> Graph:
    """The graph of a Hugging Face model without weights, likewise."""
    return resolve_model(description(kind), sequence_length=LENGTH).trace()
