"""The MoE layer between gate and residual: the modular kernel, its backends' adapters, experts.

comm_sms                reserving SMs for exchanges, around a call and not for ever
cross_stream            what a backend owes the allocator when its exchange runs on another stream than the work around it
deepep_flat             what the adapters of DeepEP V1's normal mode and of V2 share
deepep_high_throughput  backend `deepep_high_throughput`: exact receive sizes
deepep_low_latency      backend `deepep_low_latency`: fixed-size receive buffers, two halves, weights applied in combine
deepep_v2               backend `deepep_v2`: one fused kernel a call
experts                 routed experts of one layer on one rank, for both layouts of `dbo.moe.interface`
gated                   the activation of a gated MLP, fused where the device has a kernel for it
grouped_experts         routed experts by torch's grouped matrix product, for devices in bf16
interface               what an all-to-all backend and an expert kernel owe each other
modular_kernel          the MoE layer between the gate and the residual
nccl                    backend `nccl`: plain `all_to_all_single`, the output argument first
row_ops                 torch row operations around exchanges, first of all the `nccl` backend's
side_stream             shared experts on a side stream: launched as soon as their input is there
symm_copy               backend `symm_copy`: rows moved by copy engines through symmetric memory, announced by signals
symm_copy_ops           torch kernels around the copies of backend `symm_copy`: `CopyRows`
"""
