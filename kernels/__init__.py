"""GPU kernels in CuTe DSL: one sub-package per operation, shared device code in `device`."""
