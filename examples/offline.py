"""Makes an image in this process, without a server.

python examples/offline.py path/to/checkpoint out.png
"""

from pathlib import Path

from omni_grpc import Omni
from omni_grpc.config.command_line import Parser
from omni_grpc.types.output_files import write_file


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder in the diffusers layout")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--size", type=int, help="width and height, in pixels")
    args = parser.parse_args()
    with Omni(args.checkpoint) as omni:
        result = omni.generate(
            "a red circle left of a blue square",
            negative_prompt="",
            true_cfg_scale=4.0,
            width=args.size,
            height=args.size,
            steps=args.steps,
            seed=7,
        )
    write_file(args.out, result.files[0])
    print(f"{args.out}: seed {result.seeds[0]}, {result.effective.steps} steps in {result.stats.total:.1f} s")


if __name__ == "__main__":
    main()
