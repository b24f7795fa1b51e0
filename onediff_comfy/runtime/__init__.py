"""Run a compiled graph: replayed as CUDA graphs, or its deep half left out."""
