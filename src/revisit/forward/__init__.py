"""Hooks that read or change a running model."""
