"""What PyTorch does otherwise while a graph is compiled, and as ever afterwards."""
