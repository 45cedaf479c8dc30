"""Graphs compiled by PyTorch's inductor, in a process of its own, and run as native code.

request | artifacts | compiler_process | service      what is asked for, where it is kept, who builds it
child -> build_artifact -> lower                      in the compiler's process only
launcher | chain | tiers | executor                   what runs it, and when
"""
