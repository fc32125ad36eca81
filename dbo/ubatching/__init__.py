"""Ubatches of one rank: the ring of contexts, the player of schedules, the wrapper and its graphs."""
