"""Types: the records that every room speaks in. Standard library only; nothing here imports another room."""
