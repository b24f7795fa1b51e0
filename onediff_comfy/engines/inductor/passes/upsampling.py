"""Convolutions of images that were just made twice as large, computed before they are.

Upsampling to the nearest by two puts four equal pixels in the place of one. A 3 x 3 convolution of that multiplies
equal values by different weights, nine products where there are four values: each of the four output pixels of one
input pixel is a 2 x 2 convolution of the small image with sums of weights. So all four are one convolution of the
small image with four times the channels, and 4/9 of the multiplications. Each output pixel's sums are of weights that
are next to each other: in one direction w0, w1 + w2 for the first pixel of two, and w0 + w1, w2 for the second.

Decoding an SDXL image has three of them among some thirty convolutions, with 29% of all multiplications.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ....capture.rewrites.op_substitutions import composite
from .rewriting import Replacement, replace_nodes

aten = torch.ops.aten

# Where channels are many, pixels are few, and the GPU waits for weights rather than for products. Measured on an H200:
# 1280 channels of 8 x 8 pixels take 100 microseconds for 47, 640 of 64 x 64 take 182 for 523, 256 of 512 x 512 take
# 0.8 ms for 3.9 (with the upsampling).
_MOST_CHANNELS = 640
_UPSAMPLING = (aten.upsample_nearest2d.vec, aten._upsample_nearest_exact2d.vec)  # the same, by two


def fold_upsampling(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with such convolutions in the place of upsampling and convolution.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    return replace_nodes(graph, _folded)


def _folded(node: Node) -> Replacement | None:
    if not _convolves_upsampled(node):
        return None
    upsampled, *others = node.args[:3]
    assert isinstance(upsampled, Node)
    operands = (upsampled.args[0], *others)
    return lambda new, copied: new.call_function(conv_of_upsampled().default, map_arg(operands, copied))


def conv_of_upsampled() -> Any:
    """The operator ``onediff_comfy::conv_of_upsampled``, which compilers take to pieces.

    It takes an image [batch, channels, height, width], a weight [out, channels, 3, 3] and a bias [out] or None. It
    gives ``conv2d(interpolate(image, scale_factor=2, mode="nearest"), weight, bias, padding=1)``, [batch, out,
    2 height, 2 width]; sums of weights are rounded to the dtype of the weight.
    """
    return composite("conv_of_upsampled(Tensor image, Tensor weight, Tensor? bias=None) -> Tensor", _conv_of_upsampled)


def _conv_of_upsampled(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    batch, _, height, width = image.shape
    out = weight.shape[0]
    # [4 * out, channels, 2, 2]: the upper pixels and the lower ones, of each the left ones and the right ones.
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    pairs = [pair for rows in _sums(exact, 2) for pair in _sums(rows, 3)]
    four = F.conv2d(image, torch.cat(pairs).to(weight.dtype), padding=1)  # [batch, 4 * out, height + 1, width + 1]
    first, second, third, fourth = (
        four[:, number * out : (number + 1) * out, down : down + height, right : right + width]
        for number, (down, right) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1)))
    )
    rows = [torch.stack(row, dim=-1) for row in ((first, second), (third, fourth))]  # [batch, out, height, width, 2]
    output = torch.stack(rows, dim=3).reshape(batch, out, 2 * height, 2 * width)
    return output if bias is None else output + bias.reshape(1, -1, 1, 1)


def _sums(weight: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the first pixel of two and of the second, 2 each in the place of 3 along ``axis``."""
    before, at, after = weight.split(1, axis)
    return torch.cat((before, at + after), axis), torch.cat((before + at, after), axis)


def _convolves_upsampled(node: Node) -> bool:
    if node.op != "call_function" or not _plain_convolution(node):
        return False
    upsampled, weight = node.args[:2]
    if not isinstance(upsampled, Node) or not isinstance(weight, Node) or upsampled.target not in _UPSAMPLING:
        return False
    channels, *window = weight.meta["val"].shape[1:]
    if window != [3, 3] or channels > _MOST_CHANNELS or len(upsampled.users) > 1:
        return False
    image, _, factors = upsampled.args
    assert isinstance(image, Node)
    if factors not in (None, [2.0, 2.0]):  # 2.2 makes 8 of 4 too, of other pixels
        return False
    sizes = zip(upsampled.meta["val"].shape[2:], image.meta["val"].shape[2:], strict=True)
    return all(str(large) == str(2 * small) for large, small in sizes)


_CONVOLUTIONS: dict[Any, tuple[Any, ...]] = {  # by default, behind image, weight and bias: stride, padding, ...
    aten.conv2d.default: ([1, 1], [0, 0], [1, 1], 1),
    aten.convolution.default: ([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
}


def _plain_convolution(node: Node) -> bool:
    """Whether it is one of all channels, with each pixel in the middle of its window."""
    defaults = _CONVOLUTIONS.get(node.target)
    if defaults is None or node.kwargs:
        return False
    given = tuple(list(value) if isinstance(value, (list, tuple)) else value for value in node.args[3:])
    found = (*given, *defaults[len(given) :])
    return found == (defaults[0], [1, 1], *defaults[2:])
