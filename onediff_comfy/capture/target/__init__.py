"""The module that is accelerated: its weights as they are now, and whether it is still the same."""
