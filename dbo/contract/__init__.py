"""What the overlap system asks of the world that it runs in.

patience          how long a watched run may stand still
benchmark         what a world offers to `dbo bench`: a function that gives one number
own               A world orders its own streams and events only
task_state        what a host task inherits from the one that starts its work, without torch
torch_task_state  what a host task inherits from the one that starts its work where torch keeps state per thread
"""
