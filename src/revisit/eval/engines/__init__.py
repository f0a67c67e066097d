"""Engines, which run the model: in this process, in Ray workers, or in vLLM."""
