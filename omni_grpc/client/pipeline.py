"""`Pipeline`: a server that is called as a pipeline of diffusers is."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omni_grpc.client.client import Client
from omni_grpc.client.extras import needs
from omni_grpc.client.result import ImageResult
from omni_grpc.types.errors import InvalidArgument, Violation

if TYPE_CHECKING:
    import PIL.Image

    from omni_grpc.client.stream import JobStream
    from omni_grpc.v1.event_pb2 import JobEvent, StepProgress

OnStepEnd = Callable[["Pipeline", int, float, dict[str, Any]], Mapping[str, Any] | None]
"""Called after each step with the pipeline, the step from 0, the timestep, and {"previews": [PIL images]}."""

SAME: Mapping[str, str] = {
    **{name: name for name in ("negative_prompt", "height", "width", "guidance_scale", "true_cfg_scale")},
    **{name: name for name in ("guidance_rescale", "strength")},
    "num_inference_steps": "steps",
    "num_images_per_prompt": "num_outputs",
    "mask_image": "mask",
}
"""Argument of diffusers -> option of `Client`."""

OUTPUT_TYPES = ("pil", "np")


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineOutput:
    """What came of a call. `images` are PIL images, or with output_type="np" an array of float32 from 0 to 1,
    [outputs, height, width, 3]. `result` has seeds, effective parameters, warnings and files.
    """

    images: Any
    result: ImageResult


class Pipeline:
    """A model of a server, called as a pipeline of diffusers is; images out, and images in where `image` is given.

    pipe = Pipeline("localhost:50051", model="qwen-image")
    image = pipe("a red circle", num_inference_steps=20, generator=torch.Generator().manual_seed(7)).images[0]

    `model` may be omitted if the server has only one. Other keywords are those of `Client`. Arguments that only a
    pipeline in this process can have (latents, embeddings) are refused by name.
    """

    def __init__(self, address: str = "localhost:50051", *, model: str | None = None, **options: Any) -> None:
        self._client = Client(address, **options)
        self.model = model
        self._interrupt = False

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    def __call__(
        self,
        prompt: str,
        *,
        image: Any = None,
        generator: Any = None,
        output_type: str = "pil",
        callback_on_step_end: OnStepEnd | None = None,
        **arguments: Any,
    ) -> PipelineOutput:
        """Generates images and waits for them.

        `generator` is a seed, or a torch.Generator whose `initial_seed()` is taken; an output has the noise of the
        server, not that of torch's generator. `callback_on_step_end(pipe, step, timestep, kwargs)` is called after each
        step, with {"previews": [...]} as kwargs; a callback that sets `pipe._interrupt = True` cancels the job, which
        raises OperationCancelled. Raises InvalidArgument for an argument that no server can have.
        """
        options = _options(arguments, generator, output_type)
        if callback_on_step_end is not None:
            options["preview_every_steps"] = 1
        self._interrupt = False
        if image is None:
            stream = self._client.stream(prompt, model=self.model, **options)
        else:
            images = image if isinstance(image, Sequence) and not isinstance(image, str | bytes) else [image]
            stream = self._client.stream_edit(prompt, images=images, model=self.model, **options)
        with stream:
            for event in stream:
                if callback_on_step_end is not None and event.HasField("step_progress"):
                    self._after_step(stream, event, callback_on_step_end)
            result = stream.result()
        assert isinstance(result, ImageResult)
        return PipelineOutput(images=result.images if output_type == "pil" else result.array(), result=result)

    def _after_step(self, stream: JobStream, event: JobEvent, callback: OnStepEnd) -> None:
        step = event.step_progress
        callback(self, step.step - 1, step.timestep, {"previews": _previews(step)})
        if self._interrupt:
            stream.cancel("the callback set pipe._interrupt")


def _options(arguments: Mapping[str, Any], generator: Any, output_type: str) -> dict[str, Any]:
    wrong = [
        Violation(name, f"is not sent to a server; it takes {', '.join(sorted(SAME))}, generator, image, output_type")
        for name in arguments
        if name not in SAME
    ]
    if output_type not in OUTPUT_TYPES:
        wrong.append(Violation("output_type", f"is {output_type!r}; use one of {', '.join(OUTPUT_TYPES)}"))
    if wrong:
        raise InvalidArgument("; ".join(f"{bad.field} {bad.description}" for bad in wrong), violations=tuple(wrong))
    options = {SAME[name]: value for name, value in arguments.items() if value is not None}
    if generator is not None:
        # a torch.Generator without torch: whoever has one has seeded it
        options["seed"] = generator.initial_seed() if hasattr(generator, "initial_seed") else generator
    return options


def _previews(step: StepProgress) -> list[PIL.Image.Image]:
    with needs("media"):
        import PIL.Image

    return [PIL.Image.open(io.BytesIO(preview.data)) for preview in step.previews]
