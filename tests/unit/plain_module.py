"""A module of another extension's that holds nothing but a number, for the tests of functions that read it."""

SCALE = 1.2
