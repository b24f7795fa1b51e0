"""The remote tier: graphs that machines share through an object store, signed. Needs the extra `fleet`."""
