"""Signatures of a fleet: keys of builders, and objects that carry one. Needs the extra `fleet`."""
