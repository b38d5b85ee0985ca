"""Everything around a kernel and nothing of its maths: checks, compiling, caching, launching."""
