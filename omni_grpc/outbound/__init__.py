"""The one way out over HTTP: what may be used (`policy`), the connections, and the clients that fetch and that call
webhooks.
"""

from omni_grpc.outbound.http import Fetched, Outbound
from omni_grpc.outbound.policy import Policy, Target
from omni_grpc.outbound.post import Answered, Poster

__all__ = ["Answered", "Fetched", "Outbound", "Policy", "Poster", "Target"]
