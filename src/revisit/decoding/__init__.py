"""The seam between decoding methods and transformers' generate()."""
