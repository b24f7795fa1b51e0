"""Tools for developing onediff-comfy: its environment, a real ComfyUI to run it in, and the demo."""
