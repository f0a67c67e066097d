"""The step in C for CPUs; optional."""
