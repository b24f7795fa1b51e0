"""Functions that a call hands over: described, with the tensors that they hold as inputs of the graph."""
