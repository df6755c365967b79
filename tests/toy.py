"""A made-up model as data: enough for everything that never loads weights."""

from pathlib import Path

from omni_grpc.types.request import Guidance, GuidanceNorm, Task
from omni_grpc.types.spec import Checkpoint, Defaults, GuidanceKind, Limits, ModelSpec


def toy_spec(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "name": "ToyPipeline",
        "family": "toy",
        "tasks": (Task.TEXT_TO_IMAGE,),
        "pipeline": "tests.toy:none",
        "guidance": (GuidanceKind.TRUE_CFG,),
        "limits": lambda configs: Limits(
            size_multiple=16, min_size=16, max_size=1024, max_pixels=512 * 512, max_prompt_tokens=77
        ),
        "defaults": lambda configs: Defaults(
            width=256, height=128, steps=20, guidance=Guidance(true_cfg_scale=4.0, norm=GuidanceNorm.RENORM)
        ),
    }
    return ModelSpec(**(values | changes))  # type: ignore[arg-type]


def toy_checkpoint(**changes: object) -> Checkpoint:
    configs = {"scheduler": {"_class_name": "ToyScheduler"}}
    return Checkpoint(name="toy", path=Path("toy"), spec=toy_spec(**changes), configs=configs)
