"""What exists once per process, and what is carried to another."""
