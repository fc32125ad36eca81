"""A step as integers: its plan, its slices, and what the ranks agree on."""
