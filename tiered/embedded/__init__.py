"""The embedded models, trained by this repository, and their tokenizers."""
