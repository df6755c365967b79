# generated from omni_grpc/types/request_options.py by tools/gen_request_options.py; do not edit
"""The keywords of `Client` and `Omni`: what a generation may ask for besides its prompt. None is the same as not given.

`*Sampling` is what both have, `*Options` adds what only a server knows: jobs and previews.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.request import GuidanceNorm, RestartPolicy, Task

if TYPE_CHECKING:
    from omni_grpc.client.media import MediaSource


class Sampling(TypedDict, total=False):
    """What every generation has."""

    negative_prompt: str | None
    """Negative prompt. An empty string counts: it turns classifier-free guidance (CFG) on."""
    steps: int | None
    """Number of denoising steps."""
    guidance_scale: float | None
    """Embedded guidance scale of distilled models."""
    true_cfg_scale: float | None
    """Classifier-free guidance (CFG) scale; active above 1 and with a negative prompt."""
    guidance_norm: GuidanceNorm | str | None
    """What happens to the length of the guided prediction, token by token."""
    guidance_rescale: float | None
    """Share of the guided prediction that is rescaled to the standard deviation of the conditional one, 0 to 1."""
    guidance_interval_start: float | None
    """CFG is on from this fraction of the steps, 0 to 1."""
    guidance_interval_end: float | None
    """CFG is on until before this fraction of the steps, 0 to 1."""
    guidance_scale_low_noise: float | None
    """CFG scale of the low-noise expert, for models with two experts. Not given: true_cfg_scale."""
    boundary_ratio: float | None
    """Fraction of the training timesteps at which the low-noise expert takes over, 0 to 1."""
    seed: int | None
    """Seed of output 0; output i uses seed + i. Not given: random."""
    seeds: Sequence[int] | None
    """One seed per output. Set this or seed."""
    num_outputs: int | None
    """Number of outputs."""
    scheduler: str | None
    """One of the model's schedulers, by class name. Not given: the checkpoint's own."""
    shift: float | None
    """Constant time shift of the schedule, in place of the checkpoint's rule. Not given: that rule."""
    sigmas: Sequence[float] | None
    """Noise levels before the shift, one for each step, falling from at most 1."""
    preset: str | None
    """A preset of the model, which sets what this request does not: steps, schedule, guidance, adapters. none: no
    preset. Not given: the model's default one, if it has one."""
    loras: Mapping[str, float] | None
    """LoRA adapters, by NAME or NAME@COMPONENT, with scales."""
    cache: str | Mapping[str, Mapping[str, Any]] | None
    """Step cache: off, a quality (near_lossless, balanced, fast), a method, or {method: {field: value}}. Not given: the
    server's own."""
    extra: Mapping[str, Any] | None
    """Parameters of this one model, by name."""
    embed_parameters: bool | None
    """Write the parameters (prompt, seed, settings) into the output files where they are made, and not only when they
    are saved."""


class JobOptions(TypedDict, total=False):
    """How a server treats the job of a generation."""

    request_id: str | None
    """Idempotency key. Not given: a new UUID4."""
    labels: Mapping[str, str] | None
    """Labels of the job, to list jobs by."""
    priority: int | None
    """Priority, -100 to 100; jobs with a higher one run first."""
    queue_timeout: float | None
    """Seconds after which a job that has not started fails, whoever waits for it."""
    run_timeout: float | None
    """Seconds from its start after which a job fails."""
    retention: float | None
    """Seconds that the server keeps the job and its outputs after its end."""
    on_server_restart: RestartPolicy | str | None
    """What becomes of the job if the server is lost while it runs: REQUEUE starts it over, FAIL ends it."""
    webhook_url: str | None
    """HTTPS address that is told when the job ends."""
    webhook_secret_name: str | None
    """Name of the server's secret that signs what is sent to webhook_url."""


class ImageSampling(Sampling, total=False):
    """What an image has besides."""

    width: int | None
    """Width in pixels."""
    height: int | None
    """Height in pixels."""
    output_format: ImageFormat | str | None
    """How images are encoded."""


class ImageOptions(ImageSampling, JobOptions, total=False):
    """An image made by a server."""

    preview_every_steps: int | None
    """Small pictures of the latents on every n-th step event (`step_progress.previews`). Not given: none."""
    preview_max_edge_px: int | None
    """Longer side of a preview in pixels at most."""


class EditSampling(Sampling, total=False):
    """What an edit of images has besides."""

    width: int | None
    """Width in pixels."""
    height: int | None
    """Height in pixels."""
    mask: MediaSource | None
    """Mask, as large as the first image: white is regenerated (inpainted), black is kept."""
    strength: float | None
    """Fraction of noise added to the input, 0 to 1."""
    layers: int | None
    """Number of layers to take the image apart into, each with alpha."""
    task: Task | str | None
    """The task. Not given: found from the inputs."""
    output_format: ImageFormat | str | None
    """How images are encoded."""


class EditOptions(EditSampling, JobOptions, total=False):
    """An edit of images made by a server."""

    preview_every_steps: int | None
    """Small pictures of the latents on every n-th step event (`step_progress.previews`). Not given: none."""
    preview_max_edge_px: int | None
    """Longer side of a preview in pixels at most."""


class VideoSampling(Sampling, total=False):
    """What a video has besides."""

    width: int | None
    """Width in pixels."""
    height: int | None
    """Height in pixels."""
    first_frame: MediaSource | None
    """Image that the video starts with (image to video)."""
    last_frame: MediaSource | None
    """Image that the video ends with."""
    source_video: MediaSource | None
    """Video to start from (video to video)."""
    reference_images: Sequence[MediaSource] | None
    """Images of what is to appear."""
    control_video: MediaSource | None
    """Control video: poses, depth or edges to follow."""
    mask_video: MediaSource | None
    """Mask: white is regenerated (inpainted), black is kept."""
    audio: MediaSource | None
    """Audio that drives the video."""
    strength: float | None
    """Fraction of noise added to the input, 0 to 1."""
    num_frames: int | None
    """Number of frames. Set this or duration."""
    duration: float | None
    """Length in seconds. A video gets the nearest valid number of frames."""
    fps: float | None
    """Frame rate that the video is generated for."""
    output_fps: float | None
    """Frame rate of the file."""
    task: Task | str | None
    """The task. Not given: found from the inputs."""
    output_format: VideoFormat | str | None
    """How videos are encoded."""


class VideoOptions(VideoSampling, JobOptions, total=False):
    """A video made by a server."""

    preview_every_steps: int | None
    """Small pictures of the latents on every n-th step event (`step_progress.previews`). Not given: none."""
    preview_max_edge_px: int | None
    """Longer side of a preview in pixels at most."""


class AudioSampling(Sampling, total=False):
    """What a sound has besides."""

    text: str | None
    """Words to sing or speak."""
    reference: MediaSource | None
    """Reference audio to start from."""
    strength: float | None
    """Fraction of noise added to the input, 0 to 1."""
    start: float | None
    """Start of the clip within the whole piece, in seconds."""
    end: float | None
    """End of the clip within the whole piece, in seconds. Set this or duration."""
    duration: float | None
    """Length in seconds. A video gets the nearest valid number of frames."""
    sample_rate_hz: int | None
    """Sampling rate of the file, in Hz."""
    output_format: AudioFormat | str | None
    """How sounds are encoded."""


class AudioOptions(AudioSampling, JobOptions, total=False):
    """A sound made by a server."""
