"""Jobs, their logs, outputs and uploads: what a server keeps, and where."""
