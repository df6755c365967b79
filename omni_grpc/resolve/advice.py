"""What is worth a warning: each row looks at what was asked and at what will be done.

`resolve_request` walks ADVICE; a warning goes out with the result. To warn of something else, add a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from omni_grpc.resolve.rules import ServingFacts, takes
from omni_grpc.types.lora import copies
from omni_grpc.types.request import Draft, Guidance, GuidanceNorm, Request, has_negative
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import GuidanceKind
from omni_grpc.types.written import written

WORD = re.compile(r"[^\W_](?:\S*[^\W_])?")
"""What is between white space, without the punctuation around it."""
MOST_WORDS = 10
"""Of those that one warning names."""

CFG_FIELDS = ("true_cfg_scale", "norm", "rescale", "interval_start", "interval_end")
"""What belongs to guidance by a second prediction, and means nothing without one."""

EXPERT_FIELDS = ("scale_low_noise", "boundary_ratio")
"""What belongs to models with two experts."""


def _scale_without_effect(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
    if draft.guidance.scale is None or request.guidance.scale is not None:
        return None
    name, embedded = facts.checkpoint.spec.name, GuidanceKind.EMBEDDED in facts.checkpoint.guidance
    return RequestWarning(
        code="GUIDANCE_WITHOUT_EFFECT",
        field="sampling.guidance.scale",
        message=f"{name} does not guide prompts like this one, with a quoted text or without one"
        if embedded
        else f"{name} has no embedded guidance; use sampling.guidance.true_cfg_scale with a negative_prompt",
        requested=f"{draft.guidance.scale:g}",
    )


def _cfg_not_supported(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
    if draft.guidance.true_cfg_scale is None or GuidanceKind.TRUE_CFG in facts.checkpoint.guidance:
        return None
    return RequestWarning(
        code="GUIDANCE_WITHOUT_EFFECT",
        field="sampling.guidance.true_cfg_scale",
        message=f"{facts.checkpoint.spec.name} does not support classifier-free guidance",
        requested=f"{draft.guidance.true_cfg_scale:g}",
    )


def _cfg_without_negative(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
    if has_negative(request) or has_negative(draft):
        return None
    if (draft.guidance.true_cfg_scale or 0) <= 1:
        return None
    return RequestWarning(
        code="CFG_OFF",
        field="negative_prompt",
        message="true_cfg_scale needs a negative_prompt, which is not set; set it, an empty string is enough",
        requested=f"{draft.guidance.true_cfg_scale:g}",
        applied="1",
    )


def _negative_without_cfg(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
    if draft.negative_prompt is None or request.negative_prompt is not None:
        return None
    return RequestWarning(
        code="NEGATIVE_PROMPT_WITHOUT_EFFECT",
        field="negative_prompt",
        message="not used, because classifier-free guidance is off; set sampling.guidance.true_cfg_scale above 1",
    )


def _needs_cfg(name: str) -> Callable[[Draft, Request, ServingFacts], RequestWarning | None]:
    def advice(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
        value = getattr(draft.guidance, name)
        if value in (None, getattr(Guidance(), name)) or has_negative(request) or takes(name, facts):
            return None
        return RequestWarning(
            code="GUIDANCE_WITHOUT_EFFECT",
            field=f"sampling.guidance.{name}",
            message="classifier-free guidance is off",
            requested=written(value),
        )

    return advice


def _rescale_under_renorm(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
    if not draft.guidance.rescale or request.guidance.norm is not GuidanceNorm.RENORM:
        return None
    return RequestWarning(
        code="GUIDANCE_WITHOUT_EFFECT",
        field="sampling.guidance.rescale",
        message="the norm RENORM overrides it; use rescale with the norm NONE",
        requested=f"{draft.guidance.rescale:g}",
    )


def _needs_experts(name: str) -> Callable[[Draft, Request, ServingFacts], RequestWarning | None]:
    def advice(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
        value = getattr(draft.guidance, name)
        if value is None or getattr(request.guidance, name) == value:
            return None
        experts = facts.checkpoint.defaults.guidance.boundary_ratio is not None
        return RequestWarning(
            code="GUIDANCE_WITHOUT_EFFECT",
            field=f"sampling.guidance.{name}",
            message="classifier-free guidance is off"
            if experts
            else f"{facts.checkpoint.spec.name} has no second expert",
            requested=f"{value:g}",
        )

    return advice


def _unknown_words(field: str) -> Callable[[Draft, Request, ServingFacts], RequestWarning | None]:
    """A model that lists the words it was trained on makes something of any other, but nobody knows what."""

    def advice(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
        known, text = facts.checkpoint.known_words, getattr(request, field)
        if not known or not text:
            return None
        unknown = list(dict.fromkeys(word for word in WORD.findall(text) if not _is_known(word, known)))
        if not unknown:
            return None
        more = f" and {len(unknown) - MOST_WORDS} more" if len(unknown) > MOST_WORDS else ""
        return RequestWarning(
            code="UNKNOWN_WORDS",
            field=field,
            message=(
                f"{', '.join(map(repr, unknown[:MOST_WORDS]))}{more}: the model was not trained on "
                f"{'this word' if len(unknown) == 1 else 'these words'}, so the result may not follow the prompt"
            ),
            requested=" ".join(unknown[:MOST_WORDS]),
        )

    return advice


def _is_known(word: str, known: frozenset[str]) -> bool:
    word = word.lower()
    return word in known or all(part in known for part in re.findall(r"[^\W_]+", word))


def _merged_loras(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
    needed = copies(request.loras, facts.found.loras)
    if not needed:
        return None
    kept = ", not quantized as the others are" if facts.found.quantized_layers else ""
    return RequestWarning(
        code="LORA_MERGED",
        field="sampling.loras",
        message=f"{len(needed)} layers are computed with copies of their weights, into which adapters are merged; "
        f"copies are in the precision of the model{kept}, and the first step that uses one makes it",
        requested=", ".join(lora.lora_id for lora in request.loras),
        applied=f"{len(needed)} copies, {sum(needed.values())} bytes",
    )


def _few_steps(draft: Draft, request: Request, facts: ServingFacts) -> RequestWarning | None:
    if facts.cache is None or request.cache is not None or (draft.cache is not None and draft.cache.off):
        return None
    return RequestWarning(
        code="CACHE_OFF",
        field="sampling.cache",
        message=f"{request.steps} steps are too few for the server to choose a step cache; name a method to use one",
        applied="off",
    )


ADVICE: tuple[Callable[[Draft, Request, ServingFacts], RequestWarning | None], ...] = (
    _scale_without_effect,
    _cfg_not_supported,
    _cfg_without_negative,
    _negative_without_cfg,
    _rescale_under_renorm,
    _unknown_words("prompt"),
    _unknown_words("negative_prompt"),
    *(_needs_cfg(name) for name in CFG_FIELDS if name != "true_cfg_scale"),
    *(_needs_experts(name) for name in EXPERT_FIELDS),
    _merged_loras,
    _few_steps,
)


def advise_priority(priority: int, policy: str) -> tuple[RequestWarning, ...]:
    """What to tell a caller who asked for a priority that the server's policy does not look at."""
    if not priority or policy == "priority":
        return ()
    return (
        RequestWarning(
            code="PRIORITY_WITHOUT_EFFECT",
            field="options.priority",
            message=f"this server's policy is {policy!r}, which ignores priorities; start it with --policy priority",
            requested=str(priority),
            applied="0",
        ),
    )
