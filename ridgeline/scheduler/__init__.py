"""Which tokens of which requests run next? No tensors, no clock, no randomness."""
