"""A schedule's compiled form: built once, replayed for any number of ranks.

footprint  what every point of a layer launches, as data
program    the compiled form of a schedule: the device program of one rank
race       races of a compiled schedule, for any number of ranks, in one pass over the program of one rank
run        A compiled schedule on R ranks: when every operation starts on every rank
"""
