"""A schedule's compiled form: built once, replayed for any number of ranks.

cells      the arrays of a compiled schedule cut into cells
program    the compiled form of a schedule: the device program of one rank, recorded once
race       races of a compiled schedule, for any number of ranks, in one pass over the program of one rank
recording  one rank's program, read from the trace of a run of two ranks
run        A compiled schedule on R ranks: when every operation starts on every rank
"""
