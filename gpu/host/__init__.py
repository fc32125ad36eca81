"""Host tasks of one rank: batons, barriers and workers on threads or greenlets.

greenlets  ubatches as greenlets on one thread: the cheaper hand-over
threads    what host threads of one rank synchronise with: raw-lock batons, a barrier, persistent workers
workers    what the host lines of a rank have in common
"""
