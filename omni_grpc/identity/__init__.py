"""Who a caller is: by a token of a file, by a JWT of an issuer, or by the certificate of a connection."""

from omni_grpc.identity.authenticator import Authenticator, authenticator

__all__ = ["Authenticator", "authenticator"]
