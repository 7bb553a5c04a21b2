"""What people would use without this library: transformers' own model and caches, with the official samplers' loop.

transformers' own diffusion generation (DiffusionGemma, 5.23) is none of them: its prompt goes once through a causal
encoder, its canvas begins as random tokens, and its decoder has weights that read its own last logits; a LLaDA is one
bidirectional stack on masks and has no such weights.
"""
