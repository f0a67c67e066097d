"""What runs the model: this process, Ray workers, vLLM."""
