"""`python -m omni_grpc pull`: fetches a checkpoint from the Hugging Face hub into its cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from omni_grpc.checkpoint import hub
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import OmniError


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m omni_grpc pull`: fetches a checkpoint into the cache and prints its folder."""
    parser = Parser(
        prog="omni-grpc pull", description="Downloads a checkpoint from the hub to the cache and prints its folder."
    )
    parser.add_argument("repo", metavar="ORG/NAME", help="name of the model on the hub")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    for name in ("httpx", "httpx2"):  # the client of huggingface_hub: a line for each request
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        print(hub.fetch(args.repo, revision=args.revision))
    except OmniError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 2
    return 0
