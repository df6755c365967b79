"""What obstore raises, in words. Its own texts hold addresses, keys and whatever the store answered."""

from __future__ import annotations

import dataclasses
import re

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
"""How S3 names an error."""
_STATUS = re.compile(r"status code: (\d{3})")
_NOT_SIGNED_IN = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "RequestTimeTooSkewed"}
)
_CREDENTIAL_SOURCES = ("169.254.169.254", "169.254.170.2", "/latest/api/token", "sts.", "credential", "Credential")


@dataclasses.dataclass(frozen=True, slots=True)
class Why:
    """What is wrong and how to mend it, and whether it may pass by itself."""

    text: str
    retryable: bool


def no_such_object(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) and _code(error) != "NoSuchBucket"


def no_such_range(error: BaseException) -> bool:
    """Whether the object ends before the range begins."""
    return _code(error) == "InvalidRange" or _status(error) == "416"


def why(error: BaseException, timeout: float) -> Why:
    code, status, text = _code(error), _status(error), str(error)
    named = code or (f"HTTP {status}" if status else "")
    if isinstance(error, TimeoutError) or "kind: Timeout" in text:
        return Why(f"it does not answer within {timeout:g} s; see to its address and the network", True)
    if code == "NoSuchBucket" or isinstance(error, FileNotFoundError):
        return Why("there is no such bucket; create it, or name another one (--artifact-url)", False)
    if code in _NOT_SIGNED_IN or status == "401" or isinstance(error, UnauthenticatedError):
        return Why(f"it refuses the credentials ({named or 'not signed in'}); see to those of the environment", False)
    if status == "403" or isinstance(error, PermissionDeniedError):
        return Why(
            f"the credentials may not do this ({named or 'denied'}); permit s3:PutObject, s3:GetObject, "
            "s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucket",
            False,
        )
    if status is None and any(source in text for source in _CREDENTIAL_SOURCES):
        return Why("there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role", True)
    if "kind: Connect" in text:
        return Why("it cannot be reached; see to its address and the network", True)
    return Why(f"it failed ({named or type(error).__name__}); try again later", status is None or status >= "500")


def _code(error: BaseException) -> str | None:
    found = _CODE.search(str(error))
    return None if found is None else found[1]


def _status(error: BaseException) -> str | None:
    found = _STATUS.search(str(error))
    return None if found is None else found[1]
