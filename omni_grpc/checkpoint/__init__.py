"""Checkpoints: where they come from, what lies in them, which spec serves them. No torch."""
