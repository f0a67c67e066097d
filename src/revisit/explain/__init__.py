"""Inspect decoding runs, check texts against images, and read vision tokens; results as pages and tables."""
