"""An OpenAI-compatible chat server and the interactive page, for use without a serving engine."""
