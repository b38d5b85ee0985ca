"""The one-launch MoE kernel: a spec, one file per phase, and the entry that launches them."""
