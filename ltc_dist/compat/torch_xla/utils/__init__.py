"""`torch_xla.utils`: a package of modules."""
