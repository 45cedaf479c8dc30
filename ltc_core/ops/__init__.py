"""What the device does for each ATen call: the table, handlers of their own, composites, the fallback to the CPU."""
