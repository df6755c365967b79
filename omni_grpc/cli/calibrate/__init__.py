"""`python -m omni_grpc calibrate`: measures what step caches need to know of a model, and how much each may change."""

from __future__ import annotations

from omni_grpc.cli.calibrate.command import main

__all__ = ["main"]
