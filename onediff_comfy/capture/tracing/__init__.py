"""Trace a forward: torch.export around a module that other threads may use."""
