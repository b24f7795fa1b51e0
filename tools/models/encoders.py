"""A tiny text encoder, a language model as newer families have, with weights of fewer bits, as ComfyUI's CLIP object.

Nothing of ComfyUI or torch is imported before it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .checkpoints import random_weights
from .formats import FORMATS, quantised

_CONFIG = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Encoder:
    """Qwen 3 with three narrow layers.

    Attributes:
        weights: one of ``tools.models.formats.FORMATS``.
    """

    weights: str

    def load(self) -> Any:
        """A CLIP, as the host's loaders make it of a file."""
        import comfy.sd
        import comfy.utils
        from comfy.text_encoders.z_image import ZImageTokenizer, te

        options = {"qwen3_4b_model_config": _CONFIG}
        plain = comfy.sd.CLIP(SimpleNamespace(params={}, clip=te(), tokenizer=ZImageTokenizer), model_options=options)
        weights: dict[str, Any] = {}
        shapes = plain.cond_stage_model.qwen3_4b.transformer.state_dict()
        for name, weight in random_weights(shapes, "", "float32", seed=1).items():
            matrix = weight.ndim == 2 and ".layers." in name
            weights |= quantised(name, weight, self.weights) if matrix else {name: weight}
        metadata = comfy.utils.detect_layer_quantization(weights, "")
        target = SimpleNamespace(params={}, clip=te(llama_quantization_metadata=metadata), tokenizer=ZImageTokenizer)
        return comfy.sd.CLIP(target, model_options=options, state_dict=[weights])


ENCODERS = {f"qwen3_{form}": Encoder(form) for form in FORMATS}
"""Text encoders with weights of fewer bits, by name."""
