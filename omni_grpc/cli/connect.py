"""The flags of the commands that talk to a server, and the client that they make."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from omni_grpc.client import Client, Retry
from omni_grpc.client.address import check_address
from omni_grpc.client.credentials import CredentialOptions
from omni_grpc.types.errors import InvalidArgument, Violation

SERVER_VARIABLE, TOKEN_VARIABLE = "OMNI_GRPC_SERVER", "OMNI_GRPC_TOKEN"
FLAGS = ("ca", "cert", "key", "tls", "token", "token_file", "insecure")
"""Arguments that say how to connect, all None where they are not given."""


def default_server() -> str:
    """The address where --server is not given."""
    return os.environ.get(SERVER_VARIABLE) or "localhost:50051"


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds --server and the flags that go with it."""
    parser.add_argument(
        "--server", type=server_address, default=default_server(), metavar="ADDRESS", help=server_help()
    )
    add_credentials(parser)


def server_address(text: str) -> str:
    """The type of --server. Raises ArgumentTypeError for what no client can dial."""
    try:
        return check_address(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.violations[0].description) from None


def server_help() -> str:
    """What --server is, and its default."""
    default = default_server().replace("%", "%%")
    return f"HOST:PORT or unix:PATH of the server (default: {SERVER_VARIABLE}, or else {default})"


def add_credentials(parser: Any) -> None:
    """Adds the flags of TLS and tokens to a parser or a group of one."""
    add_tls(parser)
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token", help=f"token that says who calls; other users can see it, unlike {TOKEN_VARIABLE}")
    token.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="send the token to another machine without TLS"
    )


def add_tls(parser: Any) -> None:
    """Adds the flags of TLS alone."""
    parser.add_argument("--ca", type=Path, metavar="FILE", help="TLS: the server's certificate authorities, in PEM")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="mTLS: the client's certificate, in PEM")
    parser.add_argument("--key", type=Path, metavar="FILE", help="mTLS: the private key of --cert")
    parser.add_argument("--tls", action="store_true", default=None, help="TLS with the usual authorities, without --ca")


def refuse_without_server(args: argparse.Namespace) -> None:
    """Raises InvalidArgument for a flag that has no effect because no server is asked."""
    for name in FLAGS:
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise InvalidArgument(
                f"{flag} has no effect without --server", violations=(Violation(name, "needs --server"),)
            )


def credential_options(args: argparse.Namespace) -> CredentialOptions:
    """What these arguments say of TLS and tokens."""
    return {
        "ca": args.ca,
        "cert": args.cert,
        "key": args.key,
        "tls": bool(args.tls),
        "token": args.token_file or args.token or os.environ.get(TOKEN_VARIABLE) or None,
        "insecure": bool(args.insecure),
    }


def connect(args: argparse.Namespace, server: str | None = None) -> Client:
    """The client for these arguments; for another server than `args.server` if one is given."""
    # whoever waits at a terminal is told that there is no room, and when to come back
    return Client(server or args.server, retry=Retry(attempts=0), **credential_options(args))
