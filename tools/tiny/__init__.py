"""Builders of tiny checkpoints, one module for each kind of pipeline."""
