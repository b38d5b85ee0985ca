"""L2 cache policies of bulk copies, as the 64-bit operand of `.L2::cache_hint`."""

EVICT_FIRST = 0x12F0000000000000  # for bytes that pass once
