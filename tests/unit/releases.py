"""What is otherwise with some releases of PyTorch that people have; ``make test-torches`` runs them."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion


def is_before(release: str) -> bool:
    """Return True if the PyTorch that is here is older."""
    return bool(TorchVersion(torch.__version__) < release)


def since(release: str, reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that an older PyTorch cannot pass; say why."""
    return pytest.mark.skipif(is_before(release), reason=f"PyTorch before {release} {reason}")
