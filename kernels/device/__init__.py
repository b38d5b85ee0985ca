"""What several kernels share: barriers, quantisation, cache policies, time stamps; for specs and
host also sizes and checks of options."""
