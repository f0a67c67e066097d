"""The embedded model `smol`: SmolLM2-135M behind the vision tower of `tiny`."""
