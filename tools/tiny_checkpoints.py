"""Builds tiny checkpoints with random weights, in the exact layout of the real ones: what tests and the demo run on.

    python tools/tiny_checkpoints.py qwen_image OUT [--seed 0] [--heads 4 --head-dim 32 --layers 2]

Nothing is downloaded: every component is made from a config, and tokenizers are trained on a few sentences. The same
arguments give the same files, in any process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omni_grpc.config.command_line import Parser
from tools.tiny.combined import build_kandinsky
from tools.tiny.cosmos import build_cosmos3
from tools.tiny.edits import (
    build_flux2_klein,
    build_qwen_image_edit,
    build_qwen_image_edit_plus,
    build_qwen_image_layered,
)
from tools.tiny.glm_image import build_glm_image
from tools.tiny.helios import build_helios
from tools.tiny.hunyuan_image import build_hunyuan_image
from tools.tiny.hunyuan_video import build_hunyuan_video15, build_hunyuan_video15_i2v
from tools.tiny.images import (
    build_flux,
    build_flux_kontext,
    build_flux_schnell,
    build_qwen_image,
    build_qwen_image_2512,
    build_stable_diffusion,
    build_stable_diffusion_img2img,
    build_stable_diffusion_inpaint,
    build_stable_diffusion_xl,
    build_z_image,
)
from tools.tiny.more_images import (
    build_ernie_image,
    build_flux2_dev,
    build_hidream,
    build_longcat_image,
    build_longcat_image_edit,
    build_ovis_image,
    build_stable_diffusion3,
)
from tools.tiny.sounding_videos import build_ltx2, build_ltx2_3
from tools.tiny.videos import (
    build_ltx,
    build_ltx_condition,
    build_stable_audio,
    build_wan_i2v,
    build_wan_single,
    build_wan_t2v,
    build_wan_ti2v,
    build_wan_ti2v_i2v,
    build_wan_v2v,
    build_wan_vace,
)

BUILDERS: Mapping[str, Callable[..., Path]] = {
    "cosmos3": build_cosmos3,
    "ernie_image": build_ernie_image,
    "flux": build_flux,
    "flux2_dev": build_flux2_dev,
    "flux2_klein": build_flux2_klein,
    "flux_kontext": build_flux_kontext,
    "flux_schnell": build_flux_schnell,
    "glm_image": build_glm_image,
    "helios": build_helios,
    "hidream": build_hidream,
    "hunyuan_image": build_hunyuan_image,
    "hunyuan_video15": build_hunyuan_video15,
    "hunyuan_video15_i2v": build_hunyuan_video15_i2v,
    "kandinsky": build_kandinsky,
    "longcat_image": build_longcat_image,
    "longcat_image_edit": build_longcat_image_edit,
    "ltx": build_ltx,
    "ltx2": build_ltx2,
    "ltx2_3": build_ltx2_3,
    "ltx_condition": build_ltx_condition,
    "ovis_image": build_ovis_image,
    "qwen_image": build_qwen_image,
    "qwen_image_2512": build_qwen_image_2512,
    "qwen_image_edit": build_qwen_image_edit,
    "qwen_image_edit_plus": build_qwen_image_edit_plus,
    "qwen_image_layered": build_qwen_image_layered,
    "stable_audio": build_stable_audio,
    "stable_diffusion": build_stable_diffusion,
    "stable_diffusion3": build_stable_diffusion3,
    "stable_diffusion_img2img": build_stable_diffusion_img2img,
    "stable_diffusion_inpaint": build_stable_diffusion_inpaint,
    "stable_diffusion_xl": build_stable_diffusion_xl,
    "wan_i2v": build_wan_i2v,
    "wan_single": build_wan_single,
    "wan_t2v": build_wan_t2v,
    "wan_ti2v": build_wan_ti2v,
    "wan_ti2v_i2v": build_wan_ti2v_i2v,
    "wan_v2v": build_wan_v2v,
    "wan_vace": build_wan_vace,
    "z_image": build_z_image,
}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("family", choices=sorted(BUILDERS))
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", type=int, help="attention heads of the transformer")
    parser.add_argument("--head-dim", type=int, help="128 where real GPU kernels are to run")
    parser.add_argument("--layers", type=int, help="blocks of the transformer")
    args = parser.parse_args()
    build = BUILDERS[args.family]
    shape = {"heads": args.heads, "head_dim": args.head_dim, "layers": args.layers}
    given = {name: value for name, value in shape.items() if value is not None}
    if unknown := given.keys() - inspect.signature(build).parameters.keys():
        parser.error(f"{args.family} has one shape alone; leave out {', '.join(sorted(unknown))}")
    print(build(args.out, seed=args.seed, **given))


if __name__ == "__main__":
    main()
