"""Weights as the host holds them: of few bits, in GGUF blocks, in Dynamic VRAM."""
