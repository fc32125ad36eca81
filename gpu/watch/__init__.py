"""What ranks say of themselves in shared memory, and the process that reads it.

flight_recorder  the board: a file in shared memory on which every rank writes where it stands
stuck            from the board to the wait-for report: who waits for whom
watchdog         the watchdog: a process that reads the board
"""
