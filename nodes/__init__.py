"""The nodes. Each is a schema, its tooltips, and one call into ``onediff_comfy``."""
