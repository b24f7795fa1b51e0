"""Many ComfyUIs behind one address: Ray places, restarts and scales them, a gateway speaks ComfyUI's own API.

Runs in an environment of its own, without torch and without the host; what it needs is the optional extra
``fleet-gateway``.
"""
