"""In their order: v0001 makes the tables."""
