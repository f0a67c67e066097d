"""Where answers are made: this process, Ray workers, vLLM."""
