"""Decodes the media of a request into pixels and samples, or refuses them by field.

Everything here blocks: call it in a thread (`asyncio.to_thread`), never on an event loop.
"""

from omni_grpc.media_in.audio import decode_audio
from omni_grpc.media_in.image import decode_image, decode_mask, decode_transparent_mask
from omni_grpc.media_in.limits import MediaLimits
from omni_grpc.media_in.source import check_sha256, read_uri
from omni_grpc.media_in.video import decode_video

__all__ = [
    "MediaLimits",
    "check_sha256",
    "decode_audio",
    "decode_image",
    "decode_mask",
    "decode_transparent_mask",
    "decode_video",
    "read_uri",
]
