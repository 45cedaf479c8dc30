"""`torch_xla.core`: a package of modules."""
