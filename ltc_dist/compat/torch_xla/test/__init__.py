"""`torch_xla.test`: a package of modules."""
