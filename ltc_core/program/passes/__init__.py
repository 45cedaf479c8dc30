"""Passes: each takes a graph and gives one that computes the same. `program.backend` says who runs which."""
