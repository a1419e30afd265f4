"""Kernels in Triton. Import nothing from here on a machine without triton.

The launcher has an operation's bare name, its kernel the suffix `_kernel`, its plain version the same name in
kernels/reference.py. A launcher takes its outputs where they must lie at fixed addresses, and then allocates nothing;
it never waits for the device.
"""
