"""Attach a dispatcher to the host's objects: MODEL, VAE, CLIP, CONTROL_NET."""
