"""How far an image is from a reference. Images are [batch, channels, height, width], latents too."""

from __future__ import annotations

import math

import torch

_WINDOW, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03  # of SSIM, as its authors chose them


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """|actual - reference| / |reference|, with Euclidean norms; 0 for equal ones."""
    actual, reference = actual.double(), reference.double()
    return float((actual - reference).norm() / reference.norm())


def psnr(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB, the peak being the reference's range; infinite for equal ones."""
    error = float((actual.double() - reference.double()).square().mean())
    return 10 * math.log10(_range(reference) ** 2 / error) if error else math.inf


def ssim(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean structural similarity over all channels: 1 for equal images, around 0 for unrelated ones.

    Wang, Bovik, Sheikh, Simoncelli, "Image quality assessment: from error visibility to structural similarity", IEEE
    Transactions on Image Processing 13(4), 2004, equation 13: windows of 11 × 11 with Gaussian weights, inside the
    image only. The dynamic range is the reference's. Sides must be 11 or more.
    """
    x, y = actual.double(), reference.double()
    channels, peak = x.shape[1], _range(reference)
    distance = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    weights = torch.exp(-distance.square() / (2 * _SIGMA**2))
    window = torch.outer(weights, weights) / weights.sum() ** 2

    def mean(values: torch.Tensor) -> torch.Tensor:
        kernel = window.expand(channels, 1, _WINDOW, _WINDOW)
        return torch.nn.functional.conv2d(values, kernel, groups=channels)

    mean_x, mean_y = mean(x), mean(y)
    variance_x, variance_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return float((luminance * structure).mean())


def _range(image: torch.Tensor) -> float:
    return float(image.max() - image.min())
