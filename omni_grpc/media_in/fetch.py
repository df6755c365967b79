"""Media that a request names by URL: fetched before they are decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from omni_grpc.media_in.inputs import InputFile
from omni_grpc.media_in.refusal import together
from omni_grpc.media_in.source import check_length, refuse_uri, scheme_of
from omni_grpc.outbound import Outbound
from omni_grpc.types.errors import InvalidArgument

INSTEAD = "or send the bytes in `data`, or upload them with UploadAsset"


def is_remote(file: InputFile) -> bool:
    """Whether its bytes are on another host."""
    return bool(file.uri) and scheme_of(file.uri) != "data"


def check(files: Sequence[InputFile], outbound: Outbound) -> None:
    """Raises InvalidArgument that names every URL that is not allowed. Nothing is fetched."""
    refusals: list[InvalidArgument] = []
    for file in filter(is_remote, files):
        path = f"{file.path}.uri"
        try:
            if scheme_of(file.uri) not in ("https", "http"):
                refuse_uri(file.uri, field=path)
            outbound.check(file.uri, field=path, instead=INSTEAD)
            check_length(file.sha256, field=file.path)
        except InvalidArgument as error:
            refusals.append(error)
    if refusals:
        raise together(refusals)


async def fetched(files: Sequence[InputFile], outbound: Outbound, *, max_bytes: int) -> list[InputFile]:
    """The files, with the bytes of those that are on other hosts, one after the other; all of them together may have
    `max_bytes` bytes. What they are is found from the bytes, not from what the host says.

    Raises InvalidArgument, FailedPrecondition or Unavailable that names the input, see `Outbound.fetch`.
    """
    found = []
    left = max(0, max_bytes - sum(len(file.data) for file in files))
    for file in files:
        if is_remote(file):
            got = await outbound.fetch(file.uri, field=f"{file.path}.uri", max_bytes=left, instead=INSTEAD)
            left -= len(got.data)
            file = dataclasses.replace(file, data=got.data, uri="")
        found.append(file)
    return found
