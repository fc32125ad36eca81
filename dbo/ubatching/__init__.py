"""Ubatches of one rank: the ring of contexts, the player of schedules, the wrapper and its graphs.

forward_context  what a forward pass may ask for without being handed it
graphs           captured steps of one rank: keys, capture in a declared phase, replay without threads
player           plays a schedule while a layer's program runs
ring             the ring: one `UBatchContext` a ubatch thread
wrapper          `UBatchWrapper`: called like the model; runs it plainly
"""
