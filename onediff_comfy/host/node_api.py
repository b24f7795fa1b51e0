"""The parts of ComfyUI's node API (V3) that our nodes are made of."""

from comfy_api.latest import ComfyExtension, io, ui

__all__ = ["ComfyExtension", "io", "ui"]
