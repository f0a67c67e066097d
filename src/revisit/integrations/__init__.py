"""Engines other than transformers' own `generate()`; each needs its own extra and is imported only when asked for."""
