"""Model families, one folder each. Import them as `omni_grpc.models`, which is this folder seen through a symlink."""

if __name__ == "models":
    raise ImportError("import omni_grpc.models, not models: two names would make two copies of every class")
