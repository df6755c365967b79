"""Headers and signatures of a webhook, by the Standard Webhooks conventions (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence

from omni_grpc.store.records import Delivery

VERSION = "v1"


def signed(delivery: Delivery, keys: Sequence[bytes], now: float) -> Mapping[str, str]:
    """The headers of an attempt that is made now (Unix seconds), with one signature for each key; without keys it is
    not signed.
    """
    timestamp = str(int(now))
    headers = {
        "Content-Type": "application/json",
        "webhook-id": delivery.id,
        "webhook-timestamp": timestamp,
    }
    if keys:
        content = b".".join((delivery.id.encode(), timestamp.encode(), delivery.body))
        headers["webhook-signature"] = " ".join(f"{VERSION},{_signature(key, content)}" for key in keys)
    return headers


def _signature(key: bytes, content: bytes) -> str:
    return base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode("ascii")
