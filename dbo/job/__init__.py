"""The main job: its request, the run of each rank, the reference, the report.

compare    do two runs of the same requests say the same? Tokens by the margin rule
defaults   what `dbo check` runs when it is told nothing
inputs     what a run of the main job is made of: a model folder, a schedule, prompts, programs
layer      a split step of some MoE layers through the real wrapper, ring, player, kernel and backend
local      a world of one rank on plain CPU tensors: no simulator, no devices
rank       one rank's whole program: build the model
reference  what the main job's run is compared with
report     from outcomes, trace and judgement to the result that the command line prints
run        the main job: a model folder and prompts through simulated ranks
types      what the main job is asked and what it answers
"""
