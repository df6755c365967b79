"""Pipelines: what a model implements (prepare, predict, advance, decode), and what all models have in common."""
