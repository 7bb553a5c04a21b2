"""How the embedded model is trained: data, losses, optimizers, checkpoints and export. Generation needs none of it."""
