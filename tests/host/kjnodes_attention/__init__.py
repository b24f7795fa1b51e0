"""A pack with one node of KJNodes', loaded from a folder that has that pack: the whole of it asks for much more."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_file = Path(os.environ["COMFYUI_KJNODES"], "nodes", "model_optimization_nodes.py")
_spec = importlib.util.spec_from_file_location("kjnodes_model_optimization", _file)
assert _spec is not None and _spec.loader is not None
_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

NODE_CLASS_MAPPINGS = {"PathchSageAttentionKJ": _module.PathchSageAttentionKJ}
