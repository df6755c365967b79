"""Measures what a served model makes: `python -m omni_grpc bench`. Loads no torch; the worker does."""
