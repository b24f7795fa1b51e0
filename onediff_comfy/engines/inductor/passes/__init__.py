"""Rewrites of a captured graph before Inductor compiles it."""
