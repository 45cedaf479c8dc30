"""`torch_xla.debug`: a package of modules."""
