"""`python -m omni_grpc.serve`: starts a server, see `omni_grpc.cli.serve`."""

import sys

from omni_grpc.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
