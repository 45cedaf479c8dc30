"""The tensor users hold, its handle, and the buffer that keeps its value from one cut to the next."""
