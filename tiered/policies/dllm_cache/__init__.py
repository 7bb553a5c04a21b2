"""dLLM-Cache: cached branches of the answer's residual stream, and recomputed rows whose values have moved."""
