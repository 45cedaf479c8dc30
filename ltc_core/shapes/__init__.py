"""Shape, dtype and strides of an op's results, and the errors that eager's kernels raise for its operands."""
