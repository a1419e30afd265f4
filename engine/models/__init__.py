"""Architectures the engine can run."""
