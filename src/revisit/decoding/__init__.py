"""How a decoding method meets transformers' generate()."""
