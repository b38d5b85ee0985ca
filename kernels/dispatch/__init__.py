"""Row permutations of an MoE: dispatch, stable expert sort with row copies, and combine."""
