"""Takes from a folder of documents about another system every name that a user of it may look for: flags, imports,
hooks, settings, table rows, commands, promises. `tests/compat/rows.json` is what it wrote.

    python tools/compat_rows.py FOLDER [--out tests/compat/rows.json]

Names alone, no sentences. A document is FOLDER/<key>_*.txt, and its key stands for it. The promises are found by a few
words of each; words that are gone are an error, so that a changed document does not lose a row in silence.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CALLS = (
    "Omni",
    "OmniDiffusionSamplingParams",
    "DiffusionParallelConfig",
    "DiffusionOutput",
    "Attention",
    "AttentionMetadata",
    "ComponentSource",
    "generate",
)
"""Whose keyword arguments are rows."""
PATTERNS: Mapping[str, str] = {
    "flag": r"(?<![\w-])(--(?!flag-name|omni-rel)[a-z][a-z0-9-]*?(?:\.(?:per_role|<role>|\w+))*)"
    r"(?:unless|offline|via\w+)?(?![\w-])",
    "environment": r"\b(DIFFUSION_[A-Z_]+)\b",
    "attention backend": r"\b([A-Z]+_ATTN|TORCH_SDPA)\b",
    "registry": r"(?<![A-Za-z])(_?(?!DIFFUSION_ATT|EXAMPLE)[A-Z]{2,}(?:_[A-Z]+)*_"
    r"(?:REGISTRY|MODELS|FUNCS|ACCELERATION|TARGETS))\b",
    "class attribute": r"(?<![\w.(/])(_(?:repeated_blocks|sp_plan|layerwise_offload_blocks_attrs?))\b",
    "class": r"\b((?!Your|Xxx)(?:Omni|Diffusion|Diffusers|Attention|AutoWeights|CFGParallel|Column|Row|QKV)"
    r"(?!Parallel\b)[A-Z][A-Za-z]+"
    r"|Omni(?=\()|Attention(?=\()|[A-Z]\w+Mixin|ComponentSource|RMSNorm|RotaryEmbedding|AdaLayerNorm)\b",
    "function": r"\b((?:get|download|dispatch|init|setup|prepare|denoise|step|post|encode|load|pre|register|from)_"
    r"(?!your)[a-z_]+|diffuse)(?=\(|\")",
    "setting": r"\b((?:step_execution|max_num_seqs|enable_multithread_weight_load|num_weight_load_threads|enforce_eager"
    r"|tensor_parallel_size|cfg_parallel_size|ulysses_degree|ring_degree|boundary_ratio|flow_shift|lora_request|lora_scale"
    r"|profiler_targets|true_cfg_scale|negative_prompt|role_category))\b",
    "pipeline attribute": r"self\.(weights_sources|stage_durations|default_sample_size|vae_scale_factor|scheduler"
    r"|text_encoder|tokenizer|vae|transformer|step_index)\b",
    "endpoint": r"(/v1/[a-z/]+[a-z])",
    "request field": r"-F \"(\w+)=",
    "config field": r"\bod_config\.(\w+)",
    "request attribute": r"\b(?:req|request|sampling_params)\.(prompts|sampling_params|multi_modal_data"
    r"|num_inference_steps|guidance_scale|height|width)\b",
    "cache setting": r"\"((?:Fn_|Bn_|max_|residual_|enable_taylor|taylorseer_|scm_|rel_l1_)\w+)\":",
    "recipe": r"(?m)^Recipe ([A-Z])\b",
    "example": r"\b(examples/(?:offline_inference|online_serving)/[\w/.-]+\w)",
    "place": r"\b((?:vllm_omni|docs)/[\w/-]*[\w-](?:\.(?:md|py|png)|(?![\w.-]))|tests/e2e)",
    "model": r"\b((?:Qwen|Wan-AI|Tongyi-MAI|Lightricks|SII-GAIR|stable-diffusion-v1-5)/[\w.-]*?\w)"
    r"(?:and[A-Z]{3}.*?)?(?![\w.-])",
    "profiler target": r"(?m)\"?\b(vae\.(?:en|de)code|text_encoder\.forward|tokenizer\.forward)\b",
}
"""Kind of row -> what its names look like."""
SECTIONS = (
    r"(?m)^\s*(?:#+ )?((?:Step )?\d(?:\.\d)?:? [A-Z][\w./() :+-]{3,60}|(?:\d\. )?Issue: .{3,50}"
    r"|torch\.compile(?: Support| \(Regional Compilation\))?|(?:Tensor|CFG|Sequence|Expert|VAE Patch|Patch VAE) "
    r"[Pp]arallel(?:ism)?(?: \([\w-]+\))?|Ring Attention|HSDP \([\w ]+\)|Step Execution|Cache Acceleration|TeaCache"
    r"|Cache-DiT"
    r"|CPU Offload|(?:Model-level|Layerwise) \(\w+\) Offload|Diffusion Pipeline Profiler.*|FP8 \(W8A8\)|GGUF \([\w-]+\)"
    r"|Attention Backends|Wan Series|Model Specific Settings|Declaring attention roles|Offline equivalents)\xb6?$"
)
COMMAND = re.compile(r"^(?:time )?(?:vllm serve|python |curl |grep |bash run|mkdir )")

PROMISES: Mapping[str, Mapping[str, str]] = {
    "000": {
        "any pipeline of from_pretrained": "Any model loadable via",
        "outputs similar to plain diffusers": "ensure output similarity",
        "verified: Qwen-Image": r"\u2022 +Qwen/Qwen-Image",
        "verified: Z-Image-Turbo": r"\u2022 +Tongyi-MAI/Z-Image-Turbo",
        "verified: Wan2.2-I2V": r"\u2022 +Wan2.2-I2V",
        "limit: CFG parallel": "CFG parallel execution",
        "limit: sequence parallel": "Sequence parallel execution",
        "limit: step caches": "Cache-DiT acceleration",
        "limit: step-wise execution": "Step-wise execution",
        "kwargs need the diffusers format": "only valid together with",
        "load kwargs win over settings": "the latter will take precedence",
        "requests win over call kwargs": "the former will take precedence",
        "load kwargs go to from_pretrained": r"Passed as-is to DiffusionPipeline",
        "call kwargs go to the call": r"Passed to pipeline.__call__",
        "FlashAttention 3 before 2": "FlashAttention-3 and then",
        "kernels library first": "HuggingFace kernels library",
        "torch's own where none works": "PyTorch's default attention",
        "attempts are logged": "are logged to console",
        "boundary and shift at load time": "during model loading time",
        "text to image": "text-to-image",
        "image to image": "image-to-image",
        "text to video": "text-to-video",
        "image to video": "image-to-video",
        "text to audio": "text-to-audio",
    },
    "001": {
        "role: self": r"\"self\" Q/K/V",
        "role: cross": r"\"cross\" K/V",
        "role with a category": "role_category=",
        "skip_sequence_parallel": "skip_sequence_parallel=True",
        "q, k, v of [B, seq, heads, head_dim]": r"\[B, seq, num_heads, head_dim\]",
        "platform's default backend": "current platform for its default",
        "pre-processing optional": "Pre-processing function",
        "post-processing required": "Post-processing function",
        "compiles repeated blocks": "automatically compiles blocks",
        "sizes divisible by tp_size": "divisible by tp_size",
        "step execution is opt-in": "keep it opt-in",
        "continuous batching of steps": "max_num_seqs > 1",
        "one block on the device": "single transformer block on GPU",
        "stage durations in the output": "stage_durations=",
        "timing lines in the log": r"\[DiffusionPipelineProfiler\] diffuse took",
        "compare speed with diffusers": "against a Diffusers baseline",
        "test in CI": "Functionality Check in CI",
        "model recipe": "What to Include",
        "reference: Qwen-Image": "Qwen-Image Dual-stream",
        "reference: Wan2.2": "Wan2.2 Video transformer",
    },
    "002": {
        "step execution for QwenImagePipeline only": "QwenImagePipeline only",
        "four threads by default": "with 4 threads",
        "abort between steps": "mid-request abort support",
        "layerwise offload on one card": "supports single-card",
        "TP and HSDP exclude each other": "Tensor Parallel and HSDP are not",
        "TeaCache and Cache-DiT exclude each other": "TeaCache and Cache-DiT are not",
        "two offloads exclude each other": r"\(Layerwise\) and CPU Offloading",
        "step execution without caches": "not compatible with cache backends",
        "one adapter for each batch": "must use a single adapter",
        "frame interpolation": "Frame Interpolation Support",
    },
    "003": {
        "output verification": r"\+ Output verification",
        "inference speed": r"\+ Inference speed",
        "parallelism support": r"\+ Parallelism support",
        "cache acceleration": r"\+ Cache acceleration",
        "patch VAE parallelism": "Patch VAE Parallelism",
        "example shows inputs and arguments": "Demonstrate the common runtime",
        "example saves results": "Save or display",
        "model recipe": "Adding a Model Recipe",
    },
    "004": {
        "baseline without compile": "disables torch.compile",
        "compile is on by default": "Enabled by default",
        "tiling comes with VAE patches": "Auto-enables",
        "CFG parallel on two ranks": "Requires exactly 2 GPUs",
        "text encoder replicated": "text encoder is replicated",
        "seconds of inference in the status": "inference_time_s",
        "fp8 needs SM89": r"SM89\+",
        "layers left out of quantisation": "Layer skipping",
        "TeaCache threshold": "Quality tuning",
        "excluded models": "Excluded models",
        "fewer steps": "Fewer Inference Steps",
        "flowchart": "Decision Flowchart",
        "adding a lossless method": "Adding a new lossless",
        "adding a lossy method": "Adding a new lossy",
        "adding a quantisation": "Adding a new quantization",
        "adding a parallelism": "Adding a new parallelism",
        "report online numbers": "Always report online",
        "warm latency": "warm \\(steady-state\\)",
        "what a model supports": "Discovering Current Capabilities",
    },
}
"""Document -> promise -> a few words by which it is found."""


def rows(key: str, text: str) -> list[dict[str, str]]:
    """The rows of one document, each once, kind by kind. Raises ValueError for a promise that is gone."""
    taken = (_patterns, _imports, _arguments, _tables, _commands)
    found = [*(row for take in taken for row in take(text)), *_promises(key, text)]
    unique = dict.fromkeys((kind, _plain(name)) for kind, name in found)
    return [{"doc": key, "kind": kind, "name": name} for kind, name in unique if name]


def _plain(name: str) -> str:
    """ASCII without markup, on one line."""
    return " ".join(re.sub(r"[^\x20-\x7e]|`", " ", name).split()).strip(" :")


def _patterns(text: str) -> Iterator[tuple[str, str]]:
    for kind, pattern in PATTERNS.items():
        yield from ((kind, match[1]) for match in re.finditer(pattern, text))
    yield from (("section", match[1]) for match in re.finditer(SECTIONS, text))


def _imports(text: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"from (vllm[\w.]*) import (\([^)]*\)|[\w, ]+)", text):
        if "your_model" not in match[1]:
            yield from (("import", f"{match[1]}.{name}") for name in re.findall(r"\w+", match[2]))


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Keywords of the calls, each alone and all of one call as an example."""
    for call in CALLS:
        for match in re.finditer(rf"\b{call}\(((?:[^()]|\([^()]*\))*)\)", text):
            inner = re.sub(r"\{[^}]*\}|#[^\n]*|\([^()]*\)", "", match[1])
            names = re.findall(r"(?<![.\w])([a-z]\w*)\s*=(?!=)", inner)
            yield from (("argument", f"{call}({name})") for name in names)
            if names and call[0] != "C":
                yield "snippet", f"{call}({', '.join(names)})"


def _tables(text: str) -> Iterator[tuple[str, str]]:
    """The first cell of each line of a table, after the heading above it."""
    lines, heading, title = text.splitlines(), "", ""
    for i, line in enumerate(lines):
        if not line.startswith("|"):
            heading = line if re.match(r"^[A-Z][\w &-]{2,40}\xb6?$", line) else heading
            continue
        if i and not lines[i - 1].startswith("|"):
            title = _plain(heading)
        if not re.match(r"^\|[-| ]+$", line) and not (i + 1 < len(lines) and re.match(r"^\|[-| ]+$", lines[i + 1])):
            yield "table row", f"{title} / {_plain(line.split('|')[1])}"


def _commands(text: str) -> Iterator[tuple[str, str]]:
    lines = iter(text.splitlines())
    for line in lines:
        if COMMAND.match(line.strip()):
            while line.rstrip().endswith("\\"):
                line = line.rstrip()[:-1] + " " + next(lines)
            yield "command", line


def _promises(key: str, text: str) -> Iterator[tuple[str, str]]:
    for name, words in PROMISES.get(key, {}).items():
        if not re.search(words, text):
            raise ValueError(f"document {key} does not say {words!r} any more, by which the promise {name!r} was found")
        yield "promise", name


def extract(folder: Path) -> list[dict[str, str]]:
    """The rows of all documents of a folder, by the keys in their names."""
    documents = sorted(folder.glob("*.txt"))
    if not documents:
        raise ValueError(f"{folder} has no *.txt")
    return [row for path in documents for row in rows(path.name.partition("_")[0], path.read_text(encoding="utf-8"))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="file to write (default: stdout)")
    args = parser.parse_args(argv)
    text = "[\n" + ",\n".join(json.dumps(row) for row in extract(args.folder)) + "\n]\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
