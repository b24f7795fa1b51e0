"""What single values and names are: a text for each value, and what code reads by which names."""
