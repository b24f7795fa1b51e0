"""From one call of a module to an FX graph in which every weight is an input."""
