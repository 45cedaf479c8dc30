"""`torch_xla._dynamo.config`: settings that scripts assign. They have no effect."""

__all__ = ["skip_input_data_check"]

# There: an argument that is pending is an error, not one more sync. Here such an argument costs nothing.
skip_input_data_check = False
