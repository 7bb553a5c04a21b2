"""dLLM-Cache: the answer's residual stream from cached branches, and the rows that have moved recomputed."""
