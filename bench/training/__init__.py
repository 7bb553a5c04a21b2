"""Training of the embedded models: data, losses, optimizers, checkpoints and export. Generation needs none of it."""
