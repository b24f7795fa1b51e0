"""Decide what answers a call: a graph that is known, one that is made for it, several together, or the host."""
