"""Types: the records that all rooms share. Standard library only; nothing here imports another room."""
