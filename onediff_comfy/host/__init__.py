"""The only part of onediff-comfy that imports ComfyUI (the host)."""
