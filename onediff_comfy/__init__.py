"""onediff-comfy: compiled graphs for ComfyUI's models.

Each folder is a layer; docs/design.md says what each does and which may import which. ``host`` is the only one that
imports ComfyUI.

Importing this package imports neither torch nor ComfyUI, so it costs milliseconds.
"""

__version__ = "0.1.0"
