"""Canvas, block schedule, commit rules and the loop that joins them with a policy's forwards."""
