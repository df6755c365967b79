"""`omni-grpc health`: whether a server takes jobs, as an exit code, for probes that speak neither gRPC nor TLS.

A health check needs no token.
"""

from __future__ import annotations

import argparse
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.cli import connect
from omni_grpc.client.address import check_address
from omni_grpc.client.channel import options_for
from omni_grpc.client.credentials import credentials
from omni_grpc.client.failure import from_call
from omni_grpc.types.errors import InvalidArgument, NotFound, Unavailable, Violation

TIMEOUT = 5.0
"""Seconds in which a server has to answer."""


def add(commands: Any) -> None:
    """Adds `health`."""
    health = commands.add_parser(
        "health", help="exit with 0 if a server takes jobs, with 1 if it does not or cannot be reached"
    )
    health.set_defaults(run=_health)
    health.add_argument(
        "--server",
        type=connect.server_address,
        default=connect.default_server(),
        metavar="ADDRESS",
        help=connect.server_help(),
    )
    connect.add_tls(health)
    health.add_argument(
        "--tls-name", metavar="NAME", help="TLS: what the certificate is for, if it is not for the host in --server"
    )
    health.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="what to ask for: `liveness`, `model:NAME` or the name of a gRPC service (default: the server as a whole)",
    )
    health.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"give up after this time (default: {TIMEOUT:g})",
    )


def _health(args: argparse.Namespace) -> int:
    address = check_address(args.server)
    proof = credentials(address, ca=args.ca, cert=args.cert, key=args.key, tls=bool(args.tls))
    if args.tls_name and proof.tls is None:
        rule = "has no effect without --ca or --tls"
        raise InvalidArgument(f"--tls-name {rule}", violations=(Violation("tls_name", rule),))
    with _channel(address, proof.tls, args.tls_name) as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = ask(health_pb2.HealthCheckRequest(service=args.service), timeout=args.timeout)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound(
                    f"the server at {address} has no service {args.service!r} to be asked for; leave out --service, or "
                    "ask for liveness"
                ) from error
            raise from_call(error, address).failure.error() from error
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        what = args.service or "the server"
        raise Unavailable(f"{what} at {address} is {status}: it loads, drains or has stopped")
    print(status)
    return 0


def _channel(address: str, tls: grpc.ChannelCredentials | None, name: str | None) -> grpc.Channel:
    # one attempt: whoever probes tries again by itself, and wants to know how it is now
    options = [*options_for(address), ("grpc.enable_retries", 0)]
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls, options=options)
