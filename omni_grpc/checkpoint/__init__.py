"""Checkpoints: where they come from, what is in them, and which spec serves them. No torch."""
