"""Load tests of a running server: `python -m omni_grpc bench serve`."""
