"""A search of docs/ for a term of the field finds the page that explains it; every page can be found and read."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from .source import ROOT

TERMS: Mapping[str, tuple[str, ...]] = {
    "README.md": ("continuous batching", "streaming", "LoRA", "reflection", "Hugging Face hub", "priorities"),
    "docs/api.md": (
        *("classifier-free guidance", "CFG", "guidance scale", "negative prompt", "scheduler", "timestep", "seed"),
        *("denoising step", "preemption", "deadline", "cancel", "retry", "resume", "idempotency", "streaming"),
        *("preview", "latents", "error codes", "image to image", "inpaint", "edit", "image to video"),
        *("video to video", "audio", "LoRA adapters", "step cache"),
    ),
    "docs/client.md": ("retry", "reconnect", "timeout", "idempotency key", "command line", "exit codes"),
    "docs/operations.md": (
        *("health check", "reflection", "drain", "priority", "deadline", "preemption", "rate limit", "proxy"),
        *("authentication", "TLS", "Docker", "warm-up", "profiler", "worker crashes", "continuous batching"),
    ),
    "docs/artifact-storage.md": (
        *("S3", "bucket", "object store", "presigned", "credentials", "permissions", "lifecycle", "multipart", "range"),
        *("network file system", "backup"),
    ),
    "docs/security.md": (
        *("TLS", "mTLS", "client certificate", "bearer|token", "JWT", "JWKS", "scopes", "tenant", "Unix socket"),
        *("certificate", "revoke", "expire", "certificate authorities", "proxy"),
        *("SSRF", "DNS rebinding", "redirects"),
    ),
    "docs/models.md": ("Hugging Face hub", "HF_HOME", "safetensors", "offline", "resumed", "pickle", "native models"),
    "docs/features.md": (
        *("quantization", "FP8", "INT8", "GGUF", "GEMM", "kernel", "attention backend", "FlashAttention", "SDPA"),
        *("TeaCache", "step cache", "DBCache", "LoRA", "layerwise offload", "CPU offload", "pinned memory"),
        *("CUDA graph", "torch.compile", "batch invariance", "deterministic", "prefetch", "transformer block"),
        *("text encoder", "rotary embedding", "tensor parallel", "sequence parallel"),
    ),
    "docs/parallel.md": (
        *("sharding", "tensor parallel", "sequence parallel", "Ulysses", "ring attention", "CFG parallelism"),
        *("pipeline parallelism", "NCCL"),
    ),
    "docs/performance-guide.md": (
        *("VAE tiling", "VAE slicing", "continuous batching", "packed rows", "varlen", "quantization", "TeaCache"),
        *("layerwise offload", "CPU offload", "CUDA graphs", "multithreaded weight loading", "lossless", "lossy"),
    ),
    "docs/performance.md": (
        *("GEMM", "kernel", "epilogue", "cuBLASLt", "FlashAttention", "packed rows", "preemption", "overhead"),
        *("CUDA graphs", "INT8 attention", "compute-sanitizer"),
    ),
    "docs/load-testing.md": (
        *("load test", "open loop", "closed loop", "Poisson", "SLO", "goodput", "coordinated omission", "bootstrap"),
        "percentile",
    ),
    "docs/capacity.md": ("GPUs", "images per hour", "utilization", "latency", "batch"),
    "docs/adapter.md": ("diffusers pipeline", "scheduler", "classifier-free guidance", "quantized"),
    "docs/web.md": ("progress", "preview", "mask", "PSNR", "axe-core", "screen readers", "CSP", "Connect client"),
    "docs/webhooks.md": (
        *("webhook", "signature", "HMAC", "retry|tried again", "SSRF", "Retry-After", "at least once", "redirects"),
        "Standard Webhooks",
    ),
    "docs/media.md": ("audio", "frame rate", "data URL", "deterministic", "upload", "alpha|composited"),
    "docs/troubleshooting.md": ("out of memory", "packed rows", "varlen", "error codes"),
    "docs/bundled-model.md": ("prompt accuracy", "PSNR", "negative prompt"),
    "docs/openai.md": ("official clients", "retry|repeat", "idempotency key", "stream", "vLLM-Omni"),
    "docs/compat-python.md": ("vLLM-Omni", "classifier-free guidance"),
    "docs/compat.md": ("vLLM-Omni",),
    "docs/glossary.md": (),
}
"""What users search for, by the page that explains it; `a|b` is either. The pages for contributors are not asked."""

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```.*?^```\n?", re.DOTALL | re.MULTILINE)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> Iterator[str]:
    """Headings, paragraphs and lists, one after the other: what is neither code nor a table."""
    for block in re.split(r"\n\s*\n", FENCE.sub("", page)):
        lines = [line for line in block.splitlines() if not line.startswith("|")]
        if lines and not block.startswith(("    ", "<!--")):
            yield " ".join(re.sub(r"`[^`]*`", "", " ".join(lines)).split())


def explains(page: str, term: str) -> bool:
    """Whether a heading or a sentence of the page has one of the terms between bars, in any case and any number."""
    words = "|".join(re.escape(word) for word in term.split("|"))
    return any(re.search(rf"\b(?:{words})", block, re.IGNORECASE) for block in prose(page))


@pytest.mark.parametrize(("page", "term"), [(page, term) for page, terms in TERMS.items() for term in terms])
def test_a_term_is_on_the_page_that_explains_it(page: str, term: str) -> None:
    assert explains(text(page), term), f"{page} does not say {term!r} outside of code and tables"


@pytest.mark.parametrize(
    "page",
    [
        "# Other\n\n```\nserve --quantization\n```\n",
        "# Other\n\n| quantization | fp8 |\n",
        "Use `--quantization fp8`.\n",
    ],
)
def test_code_and_tables_do_not_explain_a_term(page: str) -> None:
    assert not explains(page, "quantization")
    assert explains(page + "\nThis is\nQuantization.\n", "is quantization")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_linked_from_the_readme(page: str) -> None:
    assert f"]({page})" in text("README.md")


@pytest.mark.parametrize("page", TERMS)
def test_a_page_begins_with_what_it_is_for(page: str) -> None:
    """A title and a paragraph of at least two sentences."""
    title, first, *_ = prose(text(page))
    assert title.startswith("# ")
    assert len(re.findall(r"[.:](?: |$)", first)) >= 2, first


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_links_lead_to_files_and_headings(page: str) -> None:
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^):]+)\)", FENCE.sub("", text(page))):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target


def _anchors(file: Path) -> set[str]:
    content = FENCE.sub("", file.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", content, re.MULTILINE)
    named = re.findall(r'<a id="([^"]+)">', content)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads} | {*named}


@pytest.mark.parametrize("page", TERMS)
def test_american_spelling(page: str) -> None:
    british = (
        r"\w*(?:colour|quantis|behaviour|neighbour|honour|synchronis|normalis|optimis|recognis)\w*|licence\w*|grey"
    )
    found = re.findall(british, " ".join(prose(text(page))), re.IGNORECASE)
    assert not found


def test_the_readme_stays_short() -> None:
    assert len(text("README.md").splitlines()) < 150
