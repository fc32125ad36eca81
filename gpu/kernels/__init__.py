"""Triton kernels of a layer and of a DCP group's exchange.

attention     MLA on a device, in the form that suits the queries
copy_rows     the kernels around the copies of backend `symm_copy`: `dbo.moe.symm_copy.CopyRows`, one each
direct        the kernel of `a2a_direct`: push into the peers' memory, wait for their flags, merge
exchange      `a2a_direct` on the host: one `DirectExchange` for each ubatch, and the fallback to `a2a`
expert_rows   rows to their experts and back: `dbo.moe.grouped_experts.RowMoves`, a kernel or two each
grouped_gemm  the two products of routed experts, with tiles as high as the experts' rows are many
layer         what `dbo.registry.layer_kernels("cuda")` answers: a layer's fused kernels, in one place
layer_rows    what a layer does between its matrix products, each as one pass over its rows
mla_decode    absorbed MLA of few queries over the paged cache: pages are read once, where they lie
packed        pack, and unpack + merge, as one kernel each: `dbo.dcp.exchange.PackKernels` for a device
rows          what the kernels share: the empty-shard mask, LSE lanes, and how a row is cut in blocks
"""
