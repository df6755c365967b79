"""`python -m omni_grpc` and `omni-grpc`: the command line."""

import sys

from omni_grpc.cli import alone, signals


def main() -> int:
    """Runs one command. What it needs is imported once it is known."""
    command, rest = sys.argv[1:2], sys.argv[2:]
    if alone.is_alone(sys.argv[1:]):
        return signals.run(lambda: alone.run(command[0], rest))
    # here, because a server started this way spawns its worker: spawn imports this module again, and the worker has no
    # use for what the command line needs
    from omni_grpc.cli import main as cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
