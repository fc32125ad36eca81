"""What the overlap system asks of the world that it runs in, and what both worlds share for it.

benchmark         what a world offers to `dbo bench`: a function that gives one number
own               a world orders its own streams and events only
patience          how long a watched run may stand still
task_state        what a host task inherits from the one that starts its work, without torch
torch_task_state  the same where torch keeps state per thread
world             typed protocols: World, Stream, Event, Group, Host, Tensors, Graph, Recorder
"""
