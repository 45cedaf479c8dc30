"""Handlers of ATen calls: the table, special handlers, composites, the fallback to the CPU."""
