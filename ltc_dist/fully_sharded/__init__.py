"""Parameters, gradients and optimizer state that are divided over the processes (FSDP, ZeRO stage 3).

Flow: `wrapper` divides a module's parameters into shards (`shards`), gathers them before its forward and again in
backward, and scatters the gradients; the module finds its whole parameters in `whole_parameters`. `consolidate` makes
one state dict of those that all processes saved.
"""
