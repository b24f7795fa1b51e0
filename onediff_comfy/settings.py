"""What a person can set, apart from the code that acts on it: the nodes must load where torch is too old."""

ENGINE_NAMES = ("auto", "inductor", "oneflow", "cudagraph", "eager")
"""The engines by the names that workflows store. ``auto`` is the best one that can serve the device."""

MINIMUM_TORCH = (2, 10)
"""The oldest torch whose ``standalone_compile`` does what the Inductor engine needs."""

GRAPH_BUDGET_BYTES = 4 << 30
"""What compiled graphs may hold in memory, weights excluded, before the least recently used goes."""
