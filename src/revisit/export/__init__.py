"""Decoding methods as folders that other programs load."""
