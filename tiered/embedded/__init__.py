"""The embedded model: a small LLaDA trained by this repository, its tasks and its tokenizer."""
