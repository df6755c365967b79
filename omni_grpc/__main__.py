"""`python -m omni_grpc` and `omni-grpc`: the command line."""

import sys


def main() -> int:
    """Runs one command. The doctor goes first: it must be able to say what is missing, so it needs nothing else."""
    if sys.argv[1:2] == ["doctor"]:
        from omni_grpc import doctor

        return doctor.main()
    # here, because a server started this way spawns its worker: spawn imports this module again, and the worker has no
    # use for what the command line needs
    from omni_grpc import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
