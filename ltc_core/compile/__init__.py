"""Shared by executors that compile: schedule, subgraphs, retracing, decompositions, scalar inputs, random numbers."""
