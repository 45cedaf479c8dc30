"""`xf`: `torch_xla.core.functions`, collectives that gradients flow through."""

from ltc_dist.functions import all_gather, all_reduce, all_to_all, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
