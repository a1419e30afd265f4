"""Cases of the Triton kernels: to be checked, to be timed on a device, and compiled for devices that are not there."""
