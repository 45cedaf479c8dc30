"""`torch_xla._internal`: a package of modules."""
