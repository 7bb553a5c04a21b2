"""Model families: the reader of config.json, the weights of a checkpoint, and the forward over rows."""
