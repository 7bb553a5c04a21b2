"""Model families: what config.json says, which weights a checkpoint holds, and the forward over rows."""
