"""`omni-grpc token`: makes, lists and revokes the tokens of a server's `--token-file`."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_grpc.cli.times import ahead, now
from omni_grpc.config.command_line import Parser
from omni_grpc.identity import certificates, tokens
from omni_grpc.identity.records import Record, is_name, read_records, scopes_of
from omni_grpc.types.caller import Scope
from omni_grpc.types.errors import OmniError
from omni_grpc.types.os_errors import plain


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 an error (one line on stderr), 2 a wrong command line."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except OmniError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {plain(error)}", file=sys.stderr)
        return 1
    return code


def _new(args: argparse.Namespace) -> int:
    token, record = tokens.add(
        args.file,
        tenant=args.tenant,
        subject=args.subject,
        scopes=args.scopes,
        expires=args.expires,
        name=args.name,
        now=now(),
    )
    print(token)
    until = "never expires" if record.expires is None else f"expires {_date(record.expires)}"
    print(
        f"{record.name} of tenant {record.tenant} ({', '.join(sorted(record.scopes))}) {until}; its hash is in "
        f"{args.file}, and the token is shown this once",
        file=sys.stderr,
    )
    return 0


def _list(args: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [("NAME", "SUBJECT", "TENANT", "SCOPES", "CREATED", "EXPIRES", "KNOWN BY")]
    rows += [_row(record) for record in read_records(args.file).all]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(record: Record) -> tuple[str, ...]:
    expires = "-" if record.expires is None else _date(record.expires)
    return (
        record.name,
        record.subject,
        record.tenant,
        ",".join(sorted(record.scopes)),
        "-" if record.created is None else _date(record.created),
        f"{expires} (expired)" if record.expired(now()) else expires,
        "token" if record.certificate is None else record.certificate,
    )


def _revoke(args: argparse.Namespace) -> int:
    record = tokens.remove(args.file, args.name)
    print(f"{record.name} is revoked; a running server knows it within about a second")
    return 0


def _names(args: argparse.Namespace) -> int:
    print(*certificates.names(args.certificate.read_text(encoding="utf-8", errors="replace")), sep="\n")
    return 0


def _date(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


# --- the command line -------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="omni-grpc token",
        description="Manages the tokens that callers of a server present. The file holds their hashes alone.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    new = commands.add_parser("new", help="make a token, and print it this once")
    new.set_defaults(run=_new)
    new.add_argument("--tenant", type=_name, required=True, help="whose jobs, outputs and limits the caller shares")
    new.add_argument("--subject", type=_name, required=True, help="who the caller is, for logs")
    new.add_argument(
        "--scopes", type=_scopes, required=True, metavar="SCOPE,...", help=f"what it may do: {', '.join(Scope)}"
    )
    new.add_argument(
        "--expires", type=ahead, metavar="WHEN", help="30d, 12h, 45m, or a date such as 2026-12-31 (default: never)"
    )
    new.add_argument("--name", type=_name, help="name of the record (default: the subject, numbered where it is taken)")
    _file(new)

    listed = commands.add_parser("list", help="list the tokens and certificates of a file")
    listed.set_defaults(run=_list)
    _file(listed)

    revoke = commands.add_parser("revoke", help="take a token or certificate out of a file")
    revoke.set_defaults(run=_revoke)
    revoke.add_argument("name", metavar="NAME", help="name of the record")
    _file(revoke)

    named = commands.add_parser("names", help="print the names by which a client certificate can be put into a file")
    named.set_defaults(run=_names)
    named.add_argument("certificate", type=Path, metavar="CERTIFICATE", help="the certificate, in PEM")
    return parser


def _file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, required=True, help="the server's --token-file")


def _name(text: str) -> str:
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: expected 1 to 256 printable characters")
    return text


def _scopes(text: str) -> frozenset[Scope]:
    try:
        return scopes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
