"""How a decoding method plugs into transformers' generate()."""
