"""The parts of `python -m gpu.check`, one module each: what is run, and when it has passed.

A part is a function of a `Setup` (and of a backend, where it is run for each) that returns whether it has passed and what
there is to say: a line for the table, and more lines where there is more to say.
"""
