"""The step on a GPU. Import nothing from here on a machine without triton."""
