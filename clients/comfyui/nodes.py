"""A server, generation and editing as nodes. Images are float32 from 0 to 1, [batch, height, width, channels]."""

from __future__ import annotations

import io
import os
import threading
from typing import Any

import comfy.model_management
import comfy.utils
import PIL.Image
import torch
from omni_grpc_client import Client, ImageResult, OperationCancelled

CATEGORY = "omni_grpc"
PREVIEW_PX = 512
LOOK_SECONDS = 0.1
"""How often it is looked at whether Cancel was pressed."""
FREE = 0
"""What a number of a node is where the model's default is wanted: nodes have no empty fields."""
TOKEN = "OMNI_GRPC_TOKEN"


class OmniGrpcServer:
    """Where the server is. A token comes from the environment, since what a node holds is saved with the workflow."""

    TITLE = "omni_grpc server"
    CATEGORY = CATEGORY
    RETURN_TYPES = ("OMNI_GRPC_SERVER",)
    RETURN_NAMES = ("server",)
    FUNCTION = "connect"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"address": ("STRING", {"default": "localhost:50051"})},
            "optional": {
                "model": ("STRING", {"default": "", "tooltip": "empty: the server's only model"}),
                "ca_file": ("STRING", {"default": "", "tooltip": "TLS: the server's certificate authorities, in PEM"}),
            },
        }

    def connect(self, address: str, model: str = "", ca_file: str = "") -> tuple[dict[str, Any]]:
        token = os.environ.get(TOKEN) or None
        return ({"address": address, "model": model or None, "ca": ca_file or None, "token": token},)


class _Generates:
    """What both kinds of generation have."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("images", "effective")
    OUTPUT_TOOLTIPS = ("", "what was really done: size, steps, seeds, guidance, warnings")

    @staticmethod
    def fields(**more: Any) -> dict[str, Any]:
        number = {"default": FREE, "min": 0, "tooltip": "0: the model's default"}
        return {
            "required": {
                "server": ("OMNI_GRPC_SERVER",),
                **more,
                "prompt": ("STRING", {"multiline": True}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**63 - 1, "control_after_generate": True}),
            },
            "optional": {
                "width": ("INT", number | {"max": 16384, "step": 8}),
                "height": ("INT", number | {"max": 16384, "step": 8}),
                "steps": ("INT", number | {"max": 1000}),
                "guidance_scale": ("FLOAT", number | {"default": 0.0, "max": 100.0, "step": 0.1}),
                "use_negative_prompt": ("BOOLEAN", {"default": False, "tooltip": "turns classifier-free guidance on"}),
                "negative_prompt": ("STRING", {"multiline": True}),
                "true_cfg_scale": ("FLOAT", number | {"default": 0.0, "max": 100.0, "step": 0.1}),
                "batch_size": ("INT", {"default": 1, "min": 1, "max": 64}),
            },
        }

    @staticmethod
    def options(seed: int, use_negative_prompt: bool, negative_prompt: str, batch_size: int, numbers: Any) -> Any:
        found = {name: value for name, value in numbers.items() if value != FREE}
        if use_negative_prompt:
            found["negative_prompt"] = negative_prompt
        return found | {"seed": seed, "num_outputs": batch_size, "preview_every_steps": 1}


class OmniGrpcGenerate(_Generates):
    """Generates images from a prompt."""

    TITLE = "omni_grpc generate"
    FUNCTION = "generate"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return cls.fields()

    def generate(
        self,
        server: dict[str, Any],
        prompt: str,
        seed: int,
        use_negative_prompt: bool = False,
        negative_prompt: str = "",
        batch_size: int = 1,
        **numbers: float,
    ) -> tuple[torch.Tensor, str]:
        options = self.options(seed, use_negative_prompt, negative_prompt, batch_size, numbers)
        with _client(server) as client, client.stream(prompt, model=server["model"], **options) as stream:
            return _followed(stream)


class OmniGrpcEdit(_Generates):
    """Generates images from images and a prompt; with a mask, where the mask is white."""

    TITLE = "omni_grpc edit"
    FUNCTION = "edit"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        fields = cls.fields(images=("IMAGE",))
        fields["optional"]["mask"] = ("MASK",)
        strength = {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "0: the model's default"}
        fields["optional"]["strength"] = ("FLOAT", strength)
        return fields

    def edit(
        self,
        server: dict[str, Any],
        images: torch.Tensor,
        prompt: str,
        seed: int,
        use_negative_prompt: bool = False,
        negative_prompt: str = "",
        batch_size: int = 1,
        mask: torch.Tensor | None = None,
        **numbers: float,
    ) -> tuple[torch.Tensor, str]:
        options = self.options(seed, use_negative_prompt, negative_prompt, batch_size, numbers)
        if mask is not None:
            options["mask"] = _pixels(mask[0])
        pictures = [_pixels(image) for image in images]
        model = server["model"]
        with _client(server) as client, client.stream_edit(prompt, images=pictures, model=model, **options) as stream:
            return _followed(stream)


NODES: tuple[Any, ...] = (OmniGrpcServer, OmniGrpcGenerate, OmniGrpcEdit)


def _client(server: dict[str, Any]) -> Client:
    return Client(server["address"], ca=server["ca"], token=server["token"])


def _followed(stream: Any) -> tuple[torch.Tensor, str]:
    """The result of a job, with ComfyUI's bar and preview until then. ComfyUI's Cancel cancels the job."""
    done = threading.Event()
    watch = threading.Thread(target=_cancels, args=(stream, done), daemon=True)
    watch.start()
    try:
        return _result(stream)
    except OperationCancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise
    finally:
        done.set()
        watch.join()


def _cancels(stream: Any, done: threading.Event) -> None:
    """On a thread of its own, since no event may come for as long as a job waits or a step takes."""
    while not done.wait(LOOK_SECONDS):
        if comfy.model_management.processing_interrupted():
            stream.cancel("cancelled in ComfyUI")
            return


def _result(stream: Any) -> tuple[torch.Tensor, str]:
    bar = None
    for event in stream:
        if not event.HasField("step_progress"):
            continue
        step = event.step_progress
        bar = bar or comfy.utils.ProgressBar(step.total_steps)
        shown = None
        if step.previews:
            shown = ("JPEG", PIL.Image.open(io.BytesIO(step.previews[-1].data)).convert("RGB"), PREVIEW_PX)
        bar.update_absolute(step.step, step.total_steps, shown)
    result: ImageResult = stream.result()
    return torch.from_numpy(result.array()), _effective(result)


def _effective(result: ImageResult) -> str:
    lines = [str(result.effective), *(f"warning {warning.code}: {warning.message}" for warning in result.warnings)]
    return "\n".join(lines)


def _pixels(image: torch.Tensor) -> Any:
    """[height, width] or [height, width, channels] from 0 to 1, as an array of uint8, which the client sends as PNG."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
