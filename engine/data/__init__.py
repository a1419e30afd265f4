"""Data that travels with the engine."""
