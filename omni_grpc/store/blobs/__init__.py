"""Where bytes are kept beyond the life of the process: a folder, or an S3-compatible object store."""
