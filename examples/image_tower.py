"""A model of images and text whose tower reads the sizes of images as numbers (Qwen-VL, GLM-V): the tower in a module of its own.

Such code cannot be traced. In a module that takes images alone it becomes one operator, and the language model around it is split.
Run: ``python examples/image_tower.py``; train with the plan as examples/train_gpt2.py does.
"""

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

import autopar

SIDE, PLACES, IMAGE = 8, 16, 255
"""Patches along a side of an image, places of an image among the tokens (four patches each), and the token at these places."""


class Tower(nn.Module):
    """The features of one image a sample, [samples, places, hidden], from patches, [samples, patches, values]."""

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = visual

    def forward(self, patches: Tensor) -> Tensor:
        sizes = torch.tensor([[1, SIDE, SIDE]] * len(patches), device=patches.device)
        features: Tensor = self.visual(patches.flatten(0, 1), grid_thw=sizes).pooler_output
        return features.unflatten(0, (len(patches), PLACES))


class Model(nn.Module):
    """Qwen2.5-VL with its tower apart. ``positions`` [samples, 3, tokens] are those of its ``get_rope_index``, or of a collator."""

    def __init__(self) -> None:
        super().__init__()
        text = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 256}
        rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
        config = Qwen2_5_VLConfig(
            text_config={**text, "hidden_size": 64, "intermediate_size": 128, "rope_parameters": rotary},
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": 64,
            },
            image_token_id=IMAGE,
        )
        self.language = Qwen2_5_VLForConditionalGeneration(config)
        self.tower = Tower(self.language.model.visual)
        self.language.model.visual = None

    def forward(self, patches: Tensor, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        image = BaseModelOutputWithPooling(pooler_output=(self.tower(patches).flatten(0, 1),))
        positions = positions.transpose(0, 1)
        found = self.language(ids, position_ids=positions, mm_encoder_outputs={"image": image}, labels=labels)
        return found.loss


def batch(samples: int, tokens: int = 32) -> dict[str, Tensor]:
    """Return random samples, each with an image behind its first token."""
    ids = torch.randint(0, IMAGE, (samples, tokens))
    ids[:, 1 : 1 + PLACES] = IMAGE
    positions = torch.arange(tokens).expand(samples, 3, tokens).contiguous()
    return {"patches": torch.randn(samples, SIDE**2, 1176), "ids": ids, "positions": positions, "labels": ids}


def main() -> autopar.Plan:
    """Return a plan that splits the language model over two stages and two ranks of tensor parallelism."""
    return autopar.search(
        Model(), example_inputs=batch(2), cluster="cpu:1x4", global_batch_size=8, pins=["pp=2", "tp=2"]
    )


if __name__ == "__main__":
    print(main())
