"""The models of a server: an engine for each that is loaded, and which of them are awake. No torch, no grpc."""

from omni_grpc.fleet.fleet import Fleet
from omni_grpc.fleet.opening import Opening, opened
from omni_grpc.fleet.served import Served

__all__ = ["Fleet", "Opening", "Served", "opened"]
