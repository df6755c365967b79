"""Makes an image on a server and follows every step of it.

python examples/client_sync.py localhost:50051 out.png
"""

import sys

from omni_grpc.client import Client
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import InvalidArgument, ResourceExhausted


def main(address: str, path: str) -> None:
    with Client(address) as client:
        try:
            with client.stream("a red circle left of a blue square", width=256, height=256, steps=8, seed=7) as stream:
                for event in stream:
                    if event.HasField("step_progress"):
                        step = event.step_progress
                        print(f"{stream.job_id}: step {step.step} of {step.total_steps}")
                result = stream.result()
        except InvalidArgument as error:
            for violation in error.violations:
                print(f"{violation.field}: {violation.description}", file=sys.stderr)
            raise SystemExit(1) from None
        except ResourceExhausted as error:
            raise SystemExit(f"busy, try again in {error.failure.retry_after} s: {error}") from None
    for warning in result.warnings:
        print(f"warning: {warning.message}")
    result.save(path)
    print(f"{path}: seed {result.seeds[0]}, {result.effective.width} x {result.effective.height}")


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", help="of a server")
    parser.add_argument("path", metavar="FILE", help="image to write")
    args = parser.parse_args()
    main(args.address, args.path)
