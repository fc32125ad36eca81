"""Timelines of traces and profiles.

chrome   one trace file for two readers: Chrome's trace viewer or Perfetto, and this project
picture  A layer as a PNG: what computes above what communicates, a colour a ubatch
profile  files of `torch.profiler` as traces: which ubatch computed while which communicated
rows     timelines: the spans of one steady layer
window   what one layer of one rank looks like in time
"""
