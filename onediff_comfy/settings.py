"""What a person can set, apart from the code that acts on it: the nodes must load where torch is too old."""

ENGINE_NAMES = ("auto", "inductor", "oneflow", "cudagraph", "eager")
"""The engines by the names that workflows store. ``auto`` is the best one that can serve the device."""

PRECISIONS = ("lossless", "fp8")
"""How exactly a model is computed, by the names that workflows store. ``lossless`` differs from eager by rounding."""

COMPILE_CHOICES = ("auto", "background", "wait")
"""Who waits for compiling, by the names that workflows store. ``auto``: nobody where another process can compile, else
the first image; ``background``: nobody, and what no other process can compile stays as it is."""

GOALS = ("exact", "faster", "fastest")
"""What OneDiff Optimize is asked for, by the names that workflows store. Only ``exact`` makes eager's picture."""

STEP_CACHE_THRESHOLD = 0.1
"""How much a first block's result may change before all layers are computed again, unless a person says otherwise."""

MINIMUM_TORCH = (2, 10)
"""The oldest torch whose ``standalone_compile`` does what the Inductor engine needs."""

GRAPH_BUDGET_SHARE = 1 / 8
"""Of a device's memory, what compiled graphs and CUDA graph recordings may hold, weights excluded."""

SPECIALISE_AFTER_RUNS = 3
"""In how many sampling runs sizes are seen before they get a graph of their own, made in the background."""

MOST_IDENTITIES = 16
"""Of one module, in one node, how many are captured: an extension that counts something in an attribute makes another
identity for every image, each is another capture, and some are another compilation."""

GRAPHS_FOLDER = "onediff_graphs"
"""The folder under the host's models folder where files to share are saved."""

GRAPH_SUFFIX = ".graph"
"""The ending of files with compiled graphs."""

DISK_LIMIT_BYTES = 20 << 30
"""What compiled graphs may take on disk; an SDXL graph takes about 50 MB. ``ONEDIFF_CACHE_LIMIT_MB`` overrides it."""

FLEET_PACKAGES = "pip install obstore cryptography"
"""What installs the packages for a store that machines share; ``onediff-comfy[fleet]`` asks for them too."""
