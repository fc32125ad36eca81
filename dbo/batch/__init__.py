"""A step as integers: its plan, its slices, and what the ranks agree on.

attention_metadata  what attention is told about a (u)batch, as device tensors
coordinate          one decision for all DP ranks: split or not, how many tokens to run, graphs or not
plan                the integer plan of one (u)batch: `BatchPlan`
slicing             which tokens and requests each ubatch gets, and the integer plan of a batch cut accordingly
"""
