"""Client certificates that the transport has verified: the names that they are known by."""

from __future__ import annotations

import datetime

from cryptography import x509

from omni_grpc.identity.records import Record, Records
from omni_grpc.types.errors import InvalidArgument, Unauthenticated


def names(pem: str) -> tuple[str, ...]:
    """The alternative names of a certificate (`DNS:host`, `URI:spiffe://...`, `EMAIL:a@b`, `IP:10.0.0.1`), then its
    subject as in RFC 4514 (`CN=render-1,O=Studio`). Raises InvalidArgument for what is no certificate.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode("ascii"))
        subject = certificate.subject.rfc4514_string()
        alternatives = _alternatives(certificate)
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise InvalidArgument("this is not a certificate in PEM", reason="BAD_CERTIFICATE") from error
    return (*alternatives, *([subject] if subject else []))


def _alternatives(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *(f"DNS:{name}" for name in found.get_values_for_type(x509.DNSName)),
        *(f"URI:{name}" for name in found.get_values_for_type(x509.UniformResourceIdentifier)),
        *(f"EMAIL:{name}" for name in found.get_values_for_type(x509.RFC822Name)),
        *(f"IP:{address}" for address in found.get_values_for_type(x509.IPAddress)),
    )


def find(records: Records, pem: str, now: datetime.datetime) -> Record:
    """Whose certificate it is: by the first of its names that the file has. Raises Unauthenticated
    (CERTIFICATE_UNKNOWN, CERTIFICATE_EXPIRED).
    """
    try:
        held = names(pem)
    except InvalidArgument as error:
        raise Unauthenticated("the client's certificate cannot be read", reason="CERTIFICATE_UNKNOWN") from error
    for name in held:
        if (record := records.by_certificate.get(name)) is not None:
            if record.expired(now):
                raise Unauthenticated(
                    f"the record {record.name!r}, which names the client's certificate, has expired",
                    reason="CERTIFICATE_EXPIRED",
                )
            return record
    raise Unauthenticated(
        f"no record of this server names the client's certificate ({'; '.join(held) or 'without a name'}); "
        "send a token, or have a record with one of these names added",
        reason="CERTIFICATE_UNKNOWN",
    )
