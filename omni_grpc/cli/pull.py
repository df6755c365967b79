"""`python -m omni_grpc pull`: fetches a checkpoint from the Hugging Face hub into its cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_grpc.checkpoint import hub
from omni_grpc.checkpoint.registry import HUB_ID
from omni_grpc.config import BUNDLED, model_of
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import OmniError


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m omni_grpc pull`: fetches a checkpoint into the cache and prints its folder."""
    parser = Parser(
        prog="omni-grpc pull", description="Downloads a checkpoint from the hub to the cache and prints its folder."
    )
    parser.add_argument("repo", metavar="ORG/NAME", help="name of the model on the hub; demo is there already")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")
    args = parser.parse_args(argv)
    folder = Path(model_of(args.repo))
    if folder == BUNDLED:
        if args.revision is not None:
            parser.error(f"--revision is for a model of the hub; {args.repo} comes with the package")
        print(folder)
        return 0
    if HUB_ID.fullmatch(args.repo) is None:
        parser.error(
            f"ORG/NAME is {args.repo!r}: give the name of a model on the hub, such as Qwen/Qwen-Image, or demo"
        )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    for name in ("httpx", "httpx2"):  # the client of huggingface_hub: a line for each request
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        print(hub.fetch(args.repo, revision=args.revision))
    except OmniError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 2
    return 0
