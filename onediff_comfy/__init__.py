"""onediff-comfy: compiled graphs for ComfyUI's models.

The package is split by what each part may know:

* ``capture`` turns one call of a module into an FX graph whose weights are inputs;
* ``engines`` turn a captured graph into something fast;
* ``graphs`` names compiled graphs, keeps them, and decides which one serves a call;
* ``host`` is the only part that imports ComfyUI.

Importing this package imports neither torch nor ComfyUI, so it costs milliseconds.
"""

__version__ = "0.1.0"
