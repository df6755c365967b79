"""The gRPC server: requests in, events out. No torch."""

from omni_grpc.server.server import Server

__all__ = ["Server"]
