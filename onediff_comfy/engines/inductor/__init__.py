"""PyTorch Inductor as an engine."""
