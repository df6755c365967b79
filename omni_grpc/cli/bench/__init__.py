"""Measures what a served model generates: `python -m omni_grpc bench`. Loads no torch; the worker does."""
