"""What is computed otherwise than the model writes it, decided while capturing."""
