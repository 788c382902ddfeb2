"""Plans the memory of a compiled call."""
