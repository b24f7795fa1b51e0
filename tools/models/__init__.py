"""Tiny models of random weights that ComfyUI takes for real ones; for tests, the demo and benchmarks."""
