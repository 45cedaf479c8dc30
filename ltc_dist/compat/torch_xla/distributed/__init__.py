"""`torch_xla.distributed`: a package of modules."""
