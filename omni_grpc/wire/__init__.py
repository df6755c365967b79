"""Maps records (frozen dataclasses) to messages of the API and back, by field names. Shared by server and client.

`to_message` and `from_message` convert a record and a message whose fields have the same names. `build` makes a message
from keyword arguments, with the same conversions. Fields that differ are listed in `exceptions.EXCEPTIONS`.
"""

from omni_grpc.wire.events import read_event
from omni_grpc.wire.read import from_message
from omni_grpc.wire.status import from_status, to_status
from omni_grpc.wire.write import ExtraFields, arm, build, to_message

__all__ = ["ExtraFields", "arm", "build", "from_message", "from_status", "read_event", "to_message", "to_status"]
