"""Text encoders of real size with random weights, and tiny ones, as ComfyUI's CLIP objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PADDED_TO = 512


class Letters:
    """Stand for UMT5's tokenizer, which is in that encoder's file: a token for each letter, padded as it pads."""

    def __init__(self, **_from_the_host: Any) -> None: ...

    def tokenize_with_weights(self, text: str, *_: Any, **__: Any) -> dict[str, list[list[tuple[int, float]]]]:
        """Return the tokens of a prompt with their weights, as the host's tokenizers do."""
        tokens = [2 + ord(letter) % 254 for letter in text[: _PADDED_TO - 1]] + [1]
        return {"umt5xxl": [[(token, 1.0) for token in tokens + [0] * (_PADDED_TO - len(tokens))]]}


@dataclass(frozen=True)
class TextEncoder:
    """How to build a CLIP.

    Attributes:
        parts: gives the host's class of the encoders, for the dtype of their weights, and that of its tokenizer.
        options: the host's ``model_options``: sizes other than the real ones.
    """

    parts: Callable[[torch.dtype], tuple[type, type]]
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, device: torch.device) -> Any:
        """Return the CLIP in bfloat16, with weights made on ``device`` that keep activations near unit scale."""
        import comfy.sd
        import torch

        from .models import random_weight

        encoders, tokenizer = self.parts(torch.bfloat16)
        target = SimpleNamespace(params={}, clip=encoders, tokenizer=tokenizer)
        clip = comfy.sd.CLIP(target, model_options=dict(self.options))
        generator = torch.Generator(device).manual_seed(0)
        for name, weight in clip.cond_stage_model.named_parameters():
            empty = torch.empty(weight.shape, device=device, dtype=weight.dtype)
            weight.copy_(random_weight(name, empty, generator))
        return clip


def _qwen3_4b(dtype: torch.dtype) -> tuple[type, type]:
    from comfy.text_encoders.z_image import ZImageTokenizer, te

    return te(dtype_llama=dtype), ZImageTokenizer


def _qwen25_7b(dtype: torch.dtype) -> tuple[type, type]:
    from comfy.text_encoders.qwen_image import QwenImageTokenizer, te

    return te(dtype_llama=dtype), QwenImageTokenizer


def _umt5(dtype: torch.dtype) -> tuple[type, type]:
    from comfy.text_encoders.wan import te

    return te(dtype_t5=dtype), Letters


_TINY: dict[str, Any] = {"num_layers": 2, "vocab_size": 256, "d_ff": 64, "num_heads": 2}
TEXT_ENCODERS = {
    "qwen3-4b": TextEncoder(_qwen3_4b),
    "qwen2.5-7b": TextEncoder(_qwen25_7b),
    "umt5-xxl": TextEncoder(_umt5),
    "tiny-umt5": TextEncoder(_umt5, {"umt5xxl_model_config": _TINY}),
}
"""Text encoders by name."""
