"""Collectives between processes and between threads, recorded in the graph."""
