"""The embedded model: a small LLaDA trained by this repository, and its tokenizer."""
