"""Trains the bundled model: see README.md beside this file."""
