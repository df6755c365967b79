"""An issuer of JSON Web Tokens: its keys, the JWKS that it publishes, and the tokens that it signs."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://issuer.example"
AUDIENCE = "omni-grpc"
MAKE = {
    "RS256": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}
NEW = 60.0
"""Seconds for which a token of the issuer is valid."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key pair with its id, and the algorithm that it signs with."""

    kid: str
    algorithm: str
    private: Any

    def jwk(self, **changes: Any) -> dict[str, Any]:
        """The public key as a JWKS lists it."""
        made = jwt.get_algorithm_by_name(self.algorithm).to_jwk(self.private.public_key(), as_dict=True)
        made |= {"kid": self.kid, "use": "sig", "alg": self.algorithm} | changes
        return {name: value for name, value in made.items() if value is not None}

    def pem(self) -> bytes:
        """The public key, which everybody may have."""
        return self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def token(self, *, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """A token that is valid but for these claims; None leaves one out."""
        now = time.time()
        content: dict[str, Any] = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "render-farm",
            "tenant": "studio",
            "scope": "openid generate read",
            "iat": int(now),
            "exp": int(now + NEW),
        }
        content = {name: value for name, value in (content | claims).items() if value is not None}
        names = {name: value for name, value in ({"kid": self.kid} | (headers or {})).items() if value is not None}
        return jwt.encode(content, self.private, self.algorithm, headers=names)


def key(kid: str = "one", algorithm: str = "ES256") -> Key:
    return Key(kid, algorithm, MAKE[algorithm]())


def jwks(*keys: Key) -> bytes:
    return json.dumps({"keys": [each.jwk() for each in keys]}).encode()


def pair(folder: Path, algorithm: str = "ES256") -> tuple[str, Path]:
    """A valid token, and the JWKS file that it is checked with."""
    made, path = key(algorithm=algorithm), folder / "jwks.json"
    path.write_bytes(jwks(made))
    return made.token(), path


class Published:
    """What an address of keys answers, and how often it was asked."""

    def __init__(self, *keys: Key) -> None:
        self.body = jwks(*keys)
        self.status = 200
        self.headers: dict[str, str] = {}
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        self.address = ""


@contextlib.contextmanager
def publishing(*keys: Key) -> Iterator[Published]:
    """A real HTTP server that publishes keys."""
    published = Published(*keys)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            published.asked += 1
            published.gate.wait(30)
            self.send_response(published.status)
            for name, value in published.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(published.body)

        def log_message(self, *_: Any) -> None:
            """Not on stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    published.address = f"http://127.0.0.1:{server.server_port}/keys"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield published
    finally:
        published.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
