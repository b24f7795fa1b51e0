"""What the nodes call. Imports the core only after checking that this installation can run it."""

from __future__ import annotations

import logging
from typing import Any

from .status import status_of
from .versions import torch_too_old

log = logging.getLogger(__name__)


def speed_up(model: Any, engine: str, node_id: str | None) -> Any:
    """``model`` accelerated by ``engine``; or as it came, with a warning, where that cannot be.

    Args:
        model: a ComfyUI MODEL.
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
    """
    reason = torch_too_old()
    if reason is not None:
        status_of(node_id)(f"not accelerated: {reason}")
        log.warning("OneDiff: %s; the model passes through unchanged", reason)
        return model
    from .model import accelerate

    return accelerate(model, engine, node_id)
