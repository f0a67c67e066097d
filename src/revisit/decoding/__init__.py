"""The connection between decoding methods and transformers' generate()."""
