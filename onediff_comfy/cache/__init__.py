"""Remember graphs: their keys, in memory, as files, and which calls they serve."""
