"""How much memory kernels take inside of themselves, measured on the device that is there."""
