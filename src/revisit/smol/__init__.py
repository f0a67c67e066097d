"""The second embedded model: a real language model, SmolLM2-135M, that learns to talk about the scenes of `revisit.tiny`."""
