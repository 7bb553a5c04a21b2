"""Passes that rebuild the answer's residual stream from cached branches, and recompute the rows that have moved.

Attention and MLP add one vector each to a row; where both are cached, a row that is not recomputed still passes its
layer. That is how dLLM-Cache (arXiv 2506.06295) renews other rows in every layer.
"""
