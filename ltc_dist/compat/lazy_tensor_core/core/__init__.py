"""`lazy_tensor_core.core`: a package of modules."""
