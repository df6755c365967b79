r"""Makes images from text on a server: output_PROMPT_IMAGE.png.

python -m omni_grpc.serve --model Qwen/Qwen-Image --port 50051
python examples/online/text_to_image.py --server localhost:50051 \
    --prompt "a red circle" "a blue square" --output out
"""

from pathlib import Path

from omni_grpc.client import Client
from omni_grpc.config.command_line import Parser
from omni_grpc.types.output_files import write_file


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--server", default="localhost:50051", metavar="HOST:PORT")
    parser.add_argument("--prompt", nargs="+", required=True)
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER")
    for name in ("--width", "--height", "--steps"):
        parser.add_argument(name, type=int, help="default: the model's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sampling = {name: getattr(args, name) for name in ("width", "height", "steps", "seed")}
    args.output.mkdir(parents=True, exist_ok=True)
    with Client(args.server) as client:
        for i, prompt in enumerate(args.prompt):
            result = client.generate_image(prompt, **sampling)
            for j, data in enumerate(result.files):
                path = args.output / f"output_{i}_{j}.png"
                write_file(path, data)
                print(f"{path}: seed {result.seeds[j]}, {result.effective.steps} steps")


if __name__ == "__main__":
    main()
