"""Facts about pipelines that no signature tells, by class name."""

from __future__ import annotations

from collections.abc import Mapping

NOT_SERVED: Mapping[str, str] = {
    "QwenImageControlNetInpaintPipeline": "needs control_mask",
    "StableAudio3AudioToAudioPipeline": "needs audio",
    "StableAudio3InpaintPipeline": "needs audio",
    "StableDiffusion3ControlNetInpaintingPipeline": "needs control_mask",
    "StableDiffusionDiffEditPipeline": "needs image_latents",
    "StableDiffusionPix2PixZeroPipeline": "needs source_embeds, target_embeds",
    "DiffusionGemmaPipeline": "makes text",
    "LLaDA2Pipeline": "makes text",
    "RFD4ProteinaPipeline": "makes coordinates of atoms",
    "FluxPriorReduxPipeline": "makes embeddings",
    "KandinskyPriorPipeline": "makes embeddings",
    "KandinskyV22PriorPipeline": "makes embeddings",
    "KandinskyV22PriorEmb2EmbPipeline": "makes embeddings",
    "StableCascadePriorPipeline": "makes embeddings",
    "WuerstchenPriorPipeline": "makes embeddings",
}
"""Parameters with a default of None that are needed all the same, and what is made."""

SEVERAL_IMAGES = frozenset(
    {"QwenImageEditPlusPipeline", "Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline",
     "JoyImageEditPlusPipeline", "QwenImage21Pipeline", "StableCascadeCombinedPipeline"}
)  # fmt: skip
"""Pipelines for which a list of pictures is one request; for all others it is a batch."""

WITHOUT_IMAGE = SEVERAL_IMAGES - {"QwenImageEditPlusPipeline", "JoyImageEditPlusPipeline"} | {
    "AnyFlowPipeline", "Cosmos2_5_PredictBasePipeline", "Cosmos3OmniPipeline", "DreamLiteMobilePipeline",
    "DreamLitePipeline", "FluxKontextPipeline", "GlmImagePipeline", "HeliosPipeline", "JoyImageEditPipeline",
    "LTXConditionPipeline", "WanVACEPipeline", "ZImageOmniPipeline",
}  # fmt: skip
"""Pipelines that take pictures or videos and do without them too. A default of None does not say so: most that need a
picture have it, and complain when they are called.
"""

SEVERAL_VIDEOS = frozenset({"LTXConditionPipeline"})
"""Pipelines for which a list of frames is a list of videos of one frame each."""

AS_LONG_AS_SOURCE = frozenset({"EasyAnimateInpaintPipeline", "LucyEditPipeline", "WanVACEPipeline"})
"""Pipelines that are told a number of frames, and fail where the source video has another one."""

STRENGTH_IS_KEPT = frozenset({"LTXConditionPipeline"})
"""Pipelines whose strength is the share of the input that is kept, and not the share that becomes noise."""

QUOTES = r"'.*?'|\".*?\"|\u2018.*?\u2019|\u201c.*?\u201d"
GUIDED_BY_QUOTES: Mapping[str, tuple[str, str, str]] = {
    "HunyuanImagePipeline": ("ocr_guider", QUOTES, "prompt_embeds_2"),
}
"""Pipelines with a guider of its own for prompts that quote a text: the component, how it knows them, and the parameter
that brings embeddings of the text instead.
"""

ONE_GENERATOR = frozenset({"AmusedScheduler", "VQDiffusionScheduler"})
"""Schedulers whose step fails with a list of generators: a batch draws from one."""
