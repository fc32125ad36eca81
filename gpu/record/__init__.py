"""The trace of one rank on devices.

ranges    ranges on the host that name what a line launches, for profilers
recorder  one rank's trace, and its rows on the board, written while its program runs
stamp     timestamps inside graphs: a captured kernel writes the device's clock into a slot
"""
