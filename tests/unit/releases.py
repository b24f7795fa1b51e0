"""What is otherwise with some releases of PyTorch that people have; ``make test-torches`` runs them."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion


def is_before(release: str) -> bool:
    """Return True if the PyTorch that is here is older."""
    return bool(TorchVersion(torch.__version__) < release)


rounds_in_16_bits = pytest.mark.xfail(
    is_before("2.13") and not torch.cuda.is_available(),
    reason="PyTorch before 2.13 leaves roundings to 16 bits out on a CPU; the proof refuses such a graph",
    strict=True,
)
"""The mark of a test that compares what Inductor made for 16 bits with eager."""


def since(release: str, reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that an older PyTorch cannot pass; say why."""
    return pytest.mark.skipif(is_before(release), reason=f"PyTorch before {release} {reason}")
