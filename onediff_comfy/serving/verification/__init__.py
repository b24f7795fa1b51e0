"""Compare graphs with eager, and time eager beside them."""
