"""An OpenAI-compatible chat endpoint over `revisit.generate`, for those without a serving engine."""
