"""Produce a graph: here, in a queue, or in another process."""
