"""`python -m omni_grpc` and `omni-grpc`: the command line."""

import sys


def main() -> int:
    """Runs one command. The doctor goes first: it must be able to say what is missing, so it needs nothing else. Those
    that only handle checkpoints have no use for grpc either.
    """
    command, rest = sys.argv[1:2], sys.argv[2:]
    if command == ["doctor"]:
        from omni_grpc.cli import doctor

        return doctor.main(rest)
    if command == ["pull"]:
        from omni_grpc.cli import pull

        return pull.main(rest)
    if command == ["token"]:
        from omni_grpc.cli import token

        return token.main(rest)
    if command == ["convert"]:
        from omni_grpc.loading import convert

        return convert.main(rest)
    # here, because a server started this way spawns its worker: spawn imports this module again, and the worker has no
    # use for what the command line needs
    from omni_grpc.cli import main as cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
