"""A DCP group of ranks on devices.

direct  `a2a_direct` of a run: a region and an end for each ubatch
group   decode context parallelism between processes: a rank's end of its DCP group, over gloo or NCCL
"""
