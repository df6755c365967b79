"""What is asked for and what comes back, under vLLM-Omni's names and with its documented defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_grpc.compat.fields import check, only
from omni_grpc.omni import Generation
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import Modality
from omni_grpc.types.request import Task
from omni_grpc.types.spec import GuidanceKind

if TYPE_CHECKING:
    import PIL.Image

Prompt = str | Mapping[str, Any]
"""Text, or a dict with "prompt" and any of "negative_prompt" and "multi_modal_data"."""

EMBEDS = "not yet: pass the prompt as text; the noise is drawn from the seed"


@dataclasses.dataclass(kw_only=True)
class OmniDiffusionSamplingParams:
    """How one prompt is sampled. None, and a `guidance_scale` of 0, leave it to the model.

    `num_frames` 1 is the model's own number. `fps` is how fast the file is played, `frame_rate` what the model is told.
    `guidance_scale` is the embedded guidance of models that have it, else classifier-free guidance. Raises
    InvalidArgument for what cannot be done, by name.
    """

    height: int | None = None
    width: int | None = None
    num_frames: int = 1
    fps: float | None = None
    frame_rate: float | None = None
    num_inference_steps: int | None = 50
    guidance_scale: float | None = 0.0
    guidance_scale_2: float | None = None
    guidance_rescale: float = 0.0
    true_cfg_scale: float | None = None
    boundary_ratio: float | None = None
    strength: float | None = None
    seed: int | None = None
    num_outputs_per_prompt: int = 1
    layers: int = 4
    extra_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    resolution: int = only(640, "not yet; give height and width")
    eta: float = only(0.0, "not yet: no scheduler here adds noise")
    sigmas: Sequence[float] | None = None
    timesteps: Any = only(None, "not yet; give num_inference_steps")
    latents: Any = only(None, EMBEDS)
    generator: Any = only(None, EMBEDS)
    output_type: str | None = only(None, "not yet: outputs are PIL images, or encoded video and audio files", "pil")
    quality: str | None = only(None, "not yet")
    max_sequence_length: int | None = only(None, "is the model's own limit")
    do_classifier_free_guidance: bool = only(
        False, "classifier-free guidance is on with a negative prompt and a scale above 1: set those instead"
    )
    cfg_normalize: bool = only(False, "not yet here; omni_grpc.Omni.generate has guidance_norm")
    enable_frame_interpolation: bool = only(False, "not yet")
    return_trajectory_latents: bool = only(False, "not yet")
    lora_request: Any = only(None, "not yet here; omni_grpc.Omni has the setting lora and generate(loras=...)")
    lora_scale: float = only(
        1.0, "belongs to lora_request, which is not supported yet; use lora_path and lora_scale of the config"
    )
    extra_step_kwargs: dict[str, Any] = only({}, "not yet")

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises InvalidArgument for what cannot be done; again before use, since fields can be set."""
        check(self, InvalidArgument)

    def of_all(self, kinds: Sequence[GuidanceKind]) -> dict[str, Any]:
        """The options of `omni_grpc.Omni` that every generation has, for a model with these kinds of guidance."""
        scale, true_scale = self.guidance_scale or None, self.true_cfg_scale
        if true_scale is None and GuidanceKind.EMBEDDED not in kinds and GuidanceKind.TRUE_CFG in kinds:
            scale, true_scale = None, scale
        return {
            "steps": self.num_inference_steps if self.sigmas is None else None,
            "guidance_scale": scale,
            "true_cfg_scale": true_scale,
            "guidance_scale_low_noise": self.guidance_scale_2,
            "guidance_rescale": self.guidance_rescale or None,
            "boundary_ratio": self.boundary_ratio,
            "sigmas": self.sigmas,
            "seed": self.seed,
            "num_outputs": self.num_outputs_per_prompt,
            "extra": self.extra_args or None,
        }

    def of_some(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """The options that only some tasks have, where they are given."""
        given = {
            "height": self.height,
            "width": self.width,
            "num_frames": None if self.num_frames == 1 else self.num_frames,
            "output_fps": self.fps,
            "fps": self.frame_rate,
            "strength": self.strength,
            "layers": self.layers if self.layers != 4 or Task.LAYERED in tasks else None,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(kw_only=True)
class OmniDiffusionRequest:
    """Prompts that are sampled alike. `request_id` comes back in every output."""

    prompts: Sequence[Prompt]
    sampling_params: OmniDiffusionSamplingParams = dataclasses.field(default_factory=OmniDiffusionSamplingParams)
    request_id: str = ""


@dataclasses.dataclass
class DiffusionOutput:
    """What one prompt gave. `output`: pictures of PIL's, or the bytes of each file of video or sound.

    `stage_durations` in seconds: "encode_prompt", "diffuse", "vae.decode". `generation` has the rest: the files, the
    seeds, what was really done, and warnings.
    """

    output: Any = None
    stage_durations: dict[str, float] | None = dataclasses.field(default_factory=dict)
    peak_memory_mb: float = 0.0
    request_id: str = ""
    generation: Generation | None = None

    def __post_init__(self) -> None:
        # pipelines written for vLLM-Omni pass None where nothing was timed
        self.stage_durations = self.stage_durations or {}

    @property
    def images(self) -> list[PIL.Image.Image]:
        """The pictures; none of a video or a sound."""
        return [picture for picture in self.output or () if not isinstance(picture, bytes)]

    @classmethod
    def of(cls, generation: Generation, modality: Modality, request_id: str) -> DiffusionOutput:
        stats = generation.stats
        return cls(
            output=generation.images if modality is Modality.IMAGE else list(generation.files),
            stage_durations={"encode_prompt": stats.encode, "diffuse": stats.denoise, "vae.decode": stats.decode},
            peak_memory_mb=stats.peak_memory_bytes / 2**20,
            request_id=request_id,
            generation=generation,
        )
