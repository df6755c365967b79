"""What this installation of PyAV can encode."""

from __future__ import annotations

import av

from omni_grpc.types.errors import FailedPrecondition, InternalError


def require_encoder(name: str) -> str:
    """The name, if there is such an encoder. Raises FailedPrecondition (CODEC_MISSING) if there is none."""
    try:
        av.Codec(name, "w")
    except av.codec.codec.UnknownCodecError:
        message = (
            f"PyAV {av.__version__} has no encoder {name!r}: install its wheel from PyPI (pip install --force-reinstall"
            " av), which brings it, or ask for another output format"
        )
        raise FailedPrecondition(message, reason="CODEC_MISSING", metadata={"codec": name}) from None
    return name


def bad_output(message: str) -> InternalError:
    """The error for an output that no file can hold."""
    return InternalError(message, reason="BAD_OUTPUT")
