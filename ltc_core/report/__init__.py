"""A report of a run: one HTML file that shows steps, programs, graphs, memory and ranks, made for laziness."""
