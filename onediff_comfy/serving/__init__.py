"""Answer the calls of an accelerated object: by a compiled graph where one is right, otherwise by the host."""
