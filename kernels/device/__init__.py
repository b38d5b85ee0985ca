"""Reusable device functions: barriers, rings, TMA, WGMMA, quantisation. Mechanism, no policy."""
