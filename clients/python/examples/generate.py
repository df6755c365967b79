"""Generates an image and shows each step: python generate.py "a red circle" out.png"""

import sys

from omni_grpc_client import Client, OmniError


def main(prompt: str, path: str, server: str = "localhost:50051") -> int:
    try:
        with Client(server) as client, client.stream(prompt, seed=7) as stream:
            for event in stream:
                if event.HasField("step_progress"):
                    print("step", event.step_progress.step, "of", event.step_progress.total_steps)
            stream.result().save(path)
    except OmniError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        for violation in error.violations:
            print(f"  {violation.field}: {violation.description}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
