"""The DeepSeek-V2 family: reading a folder, the model, and its twin without numbers.

attention      multi-head latent attention over a paged cache, in the absorbed form
config         reading a DeepSeek-V2 `config.json`, in the published and in the newer rope form
config_folder  A generated DeepSeek-V2 folder without its weights
dcp_attention  MLA on one rank of a DCP group: own keys, exchange and merge, own part of the output projection
dcp_moe        moE rows of a DCP group: peers hold the same rows
deepseek_v2    DeepSeek-V2: the program of a step, from token ids to the normed hidden state
fields         checked values out of a model folder's JSON files
generator      A small random DeepSeek-V2 folder in the published format
layers         the two pieces every layer is made of: RMS norm and the gated MLP
layout         which tensors a DeepSeek-V2 folder holds, their shapes, and which rank needs them
loader         reading a model folder's weights: safetensors only, this rank's routed experts only
paging         index arithmetic of ragged attention over a paged cache, once a forward pass
rope           rotary embedding, plain and YaRN
rope_config    the rope part of config.json, in its published and its newer form
router         the MoE gate: which experts a token goes to, and with what weight
skeleton       the model without numbers, for ordering mode
tokenizer      text to token ids and back
"""
