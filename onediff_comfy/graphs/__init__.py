"""Naming compiled graphs, keeping them, and choosing the one that serves a call."""
