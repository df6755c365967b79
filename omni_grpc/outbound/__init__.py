"""The one way out over HTTP: what may be fetched (`policy`), and the client that fetches it (`http`)."""

from omni_grpc.outbound.http import Fetched, Outbound
from omni_grpc.outbound.policy import Policy, Target

__all__ = ["Fetched", "Outbound", "Policy", "Target"]
