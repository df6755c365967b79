"""`python -m omni_grpc`: the command line."""

import sys

if __name__ == "__main__":
    # here, because a server started this way spawns its worker: spawn imports this module again, and the worker has no
    # use for what the command line needs
    from omni_grpc.cli import main

    sys.exit(main())
