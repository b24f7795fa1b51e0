"""Linear layers in 8-bit floating point, for those who choose speed over the last bits.

Inputs and weights are rounded to float8 e4m3 (Micikevicius et al. 2022, arXiv:2209.05433), each row with a scale of
its own, and multiplied by the GPU's 8-bit units; sums are in float32. Weights stay inputs of the graph as they are and
are rounded inside of it, so LoRAs and other checkpoints need nothing new. What is not a large matrix product
(convolutions, attention, what is computed once per image from the time) stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...messages import Message, first_line, message
from .op_substitutions import Forms, composite

_LARGEST = 448.0  # of float8_e4m3fn
_TINY = 1e-12  # a row of zeros has no scale
# The units multiply blocks of 16. A layer with fewer weights is no faster in 8 bits: of 2048 rows 5120 x 1280 takes 33
# microseconds for 40, and rounding its weights and inputs 16 more, where 10240 x 1280 takes 48 for 89 (H200). With all
# from 2 million on, a step of SDXL took 35.6 ms, and 34.2 without any in 8 bits (H100, benchmarks/NOTES.md 34).
_BLOCK, _LEAST_WEIGHTS = 16, 1 << 23
_ADA = (8, 9)  # the first that can; then Hopper and Blackwell
# Before, PyTorch clears what its kernels for Ada wait by on another stream than they run on, and they may wait for ever
# (pytorch/pytorch#177651).
_ADA_SINCE = (2, 12)
_PROBED_TO = 0.1  # relative error, three times what rounding makes


def fp8_unavailable(device: torch.device) -> Message | None:
    """Why nothing can be computed in fp8 on ``device``; None if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return message("fp8 needs an NVIDIA GPU, and this model runs on {device}", device=device.type)
    capability = torch.cuda.get_device_capability(device)
    if capability < _ADA:
        return message(
            "fp8 needs a GPU of compute capability 8.9 or more (GeForce RTX 40, Hopper and later); this one has {has}",
            has=".".join(map(str, capability)),
        )
    if capability == _ADA and tuple(int(part) for part in torch.__version__.split(".")[:2]) < _ADA_SINCE:
        return message("fp8 on this GPU needs PyTorch 2.12 or later, and this is {version}", version=torch.__version__)
    return _probed(torch.device(device.type, device.index or 0))


@functools.cache
def _probed(device: torch.device) -> Message | None:
    """Why products do not come out right on this device, or None; which kernels a PyTorch has is not documented."""
    try:
        for dtype in (torch.float16, torch.bfloat16):
            generator = torch.Generator(device).manual_seed(0)
            rows, weight, bias = (
                torch.randn(*shape, device=device, generator=generator).to(dtype)
                for shape in ((2, 200, 512), (1024, 512), (1024,))
            )
            for added in (None, bias):
                expected = F.linear(rows.float(), weight.float(), None if added is None else added.float())
                off = (_product(rows, weight, added).float() - expected).norm() / expected.norm()
                if not off < _PROBED_TO:
                    return message("fp8 products come out wrong on this GPU with this PyTorch")
    except Exception as error:
        return message(
            "fp8 products fail on this GPU with this PyTorch ({kind}: {first_line})",
            kind=type(error).__name__,
            first_line=first_line(error),
        )
    return None


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear`` by 8-bit products where the layer is large.

    Args:
        input: [..., in], float16 or bfloat16.
        weight: [out, in], of the same dtype.
        bias: [out] or None.

    Returns:
        [..., out], of the same dtype; off by some 3% (root mean square) for values that are normally distributed.
    """
    return product()(input, weight, bias) if _is_worth_it(input, weight) else F.linear(input, weight, bias)


def product() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::fp8_linear``; compilers fuse what it is made of with what is around it."""
    return composite("fp8_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", _product)


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # Rows first: where tokens are a sum of symbols, Inductor does not see that [batch, tokens] are as many rows, and
    # what is rounded before it is flattened takes two kernels, 124 and 105 microseconds for 162 (Flux, H200).
    rows = input.reshape(-1, input.shape[-1])
    (left, left_scale), (right, right_scale) = _rounded(rows), _rounded(weight)
    if bias is None:  # without one, some kernels write bfloat16 whatever is asked for (pytorch/pytorch#187569)
        bias = weight.new_zeros(weight.shape[0])
    output = torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scale,
        scale_b=right_scale.t(),
        bias=bias,
        out_dtype=input.dtype,
        use_fast_accum=True,
    )
    return output.reshape(*input.shape[:-1], weight.shape[0])


def _is_worth_it(input: torch.Tensor, weight: torch.Tensor) -> bool:
    if input.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != input.dtype or weight.ndim != 2:
        return False
    fits = all(size % _BLOCK == 0 for size in weight.shape)
    # By what an input is, not by how large it is in this call: a picture must not depend on what came first.
    many_rows = input.ndim > 2 and not (isinstance(input.shape[-2], int) and input.shape[-2] == 1)
    return fits and weight.numel() >= _LEAST_WEIGHTS and many_rows


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in float8, [rows, in], and what each is to be multiplied by, [rows, 1] in float32.

    By its own scale a row's largest element is the largest number or one bit beyond, which is rounded to it: nothing
    has to be clamped. A clamp and a division take a third of the kernel that rounds weights: 93 microseconds for 61
    (H200, 21504 rows of 3072; benchmarks/NOTES.md, section 38).
    """
    scale = rows.abs().amax(-1, keepdim=True).float().div(_LARGEST).clamp_min(_TINY)
    return (rows.float() * scale.reciprocal()).to(torch.float8_e4m3fn).contiguous(), scale


IN_FP8: Forms = {F.linear: linear}
