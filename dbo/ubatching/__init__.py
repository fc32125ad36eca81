"""Ubatches of one rank: the ring of contexts, the player of schedules, the wrapper and its graphs.

forward_context  what a forward pass may ask for without being handed it
"""
