"""The mechanism of Elastic-Cache: tracked tokens, the drift of their attention, and passes that widen on their way."""
