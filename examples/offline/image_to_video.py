r"""Makes videos that begin with an image in this process, without a server: output_PROMPT_VIDEO.mp4.

python examples/offline/image_to_video.py --model Wan-AI/Wan2.2-TI2V-5B-Diffusers \
    --image in.png --prompt "a red circle rolls" --output out
"""

from pathlib import Path

from omni_grpc import Omni
from omni_grpc.config.command_line import Parser
from omni_grpc.types.output_files import write_file


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder in the diffusers layout, or ORG/NAME on the hub")
    parser.add_argument("--prompt", nargs="+", required=True)
    parser.add_argument("--image", required=True, help="a file")
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER")
    for name in ("--width", "--height", "--num-frames", "--steps"):
        parser.add_argument(name, type=int, help="default: the model's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sampling = {name: getattr(args, name) for name in ("width", "height", "num_frames", "steps", "seed")}
    args.output.mkdir(parents=True, exist_ok=True)
    with Omni(args.model) as omni:
        for i, prompt in enumerate(args.prompt):
            result = omni.generate_video(prompt, first_frame=args.image, **sampling)
            for j, data in enumerate(result.files):
                path = args.output / f"output_{i}_{j}.mp4"
                write_file(path, data)
                print(f"{path}: seed {result.seeds[j]}, {result.effective.steps} steps")


if __name__ == "__main__":
    main()
