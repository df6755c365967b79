r"""Makes sounds from text in this process, without a server: output_PROMPT_SOUND.wav.

python examples/offline/text_to_audio.py --model stabilityai/stable-audio-open-1.0 \
    --prompt "rain on a roof" --output out
"""

from pathlib import Path

from omni_grpc import Omni
from omni_grpc.config.command_line import Parser
from omni_grpc.types.output_files import write_file


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder in the diffusers layout, or ORG/NAME on the hub")
    parser.add_argument("--prompt", nargs="+", required=True)
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER")
    parser.add_argument("--duration", type=float, help="seconds")
    parser.add_argument("--steps", type=int, help="default: the model's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sampling = {name: getattr(args, name) for name in ("duration", "steps", "seed")}
    args.output.mkdir(parents=True, exist_ok=True)
    with Omni(args.model) as omni:
        for i, prompt in enumerate(args.prompt):
            result = omni.generate_audio(prompt, **sampling)
            for j, data in enumerate(result.files):
                path = args.output / f"output_{i}_{j}.wav"
                write_file(path, data)
                print(f"{path}: seed {result.seeds[j]}, {result.effective.steps} steps")


if __name__ == "__main__":
    main()
