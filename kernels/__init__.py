"""Pure functions on tensors: a plain-torch reference of each, and the fast versions beside it."""

__version__ = "0.0.0"
