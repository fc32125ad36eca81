"""The request side of the engine: requests → scheduled batch → batch plan. numpy, no torch.

requests.py    one request: its tokens, its state, how far its KV is computed
kv_blocks.py   the paged KV cache's blocks, counted by reference; block 0 is the null block
scheduler.py   which tokens of which requests run in this step
batch.py       the scheduled batch as the integer plan and the model's inputs

batch       A scheduled batch as integers for the device: the plan of its attention, and the model's inputs
components  the pieces of a rank's program that may be exchanged
kv_blocks   the blocks of the paged KV cache, counted by reference
requests    one request: the tokens it knows, how far its KV is computed, and where it stands
runner      `GPUModelRunner`: one engine step after another on one rank, the same calls on every rank
sampling    from a row of logits to a token
scheduled   what one step runs: a snapshot of the scheduler's decision
scheduler   which tokens of which requests run in this step
"""
