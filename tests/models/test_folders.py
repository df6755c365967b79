"""What a model's folder has to look like."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import omni_grpc.models
import omni_grpc.pipeline
from omni_grpc.checkpoint.registry import specs

ROOT = Path(omni_grpc.models.__file__).resolve().parent
FAMILIES = sorted({spec.family for spec in specs().values()})
TRANSFORMER_LINES, PIPELINE_LINES = 250, 150

FEATURES = re.compile(
    r"(?<![a-z])q?lora|peft|quanti[sz]|fp8|(?<!u)int8|gguf|"
    r"(tea|db|mag|sea|step|block)[ _]?cache|taylor|"
    r"ulysses|(?<![a-z])ring_|(tensor|sequence|pipeline|cfg|context|expert)[ _]?parallel|"
    r"offload|compile|cuda_?graph|omni_grpc\.features|slots",
    re.IGNORECASE,
)
"""Words that name a feature. Blocks may be parallel and images coloured."""


def code(family: str) -> list[Path]:
    """The files that run. `__init__.py` is data, and may hold what a feature has to know of the model."""
    return [file for file in sorted((ROOT / family).rglob("*.py")) if file.name != "__init__.py"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_a_spec_a_transformer_pipelines_and_a_readme(family: str) -> None:
    mine = [spec for spec in specs().values() if spec.family == family]
    files = {file.name for file in (ROOT / family).iterdir()}
    assert {"__init__.py", "README.md", f"{family}_transformer.py"} <= files
    readme = (ROOT / family / "README.md").read_text(encoding="utf-8")
    for spec in mine:
        module = spec.pipeline.partition(":")[0]
        assert module.startswith(f"omni_grpc.models.{family}.pipeline_")
        assert f"{module.rpartition('.')[2]}.py" in files
        assert spec.name in readme


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_short(family: str) -> None:
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in code(family)}
    assert lines[f"{family}_transformer.py"] < TRANSFORMER_LINES
    assert all(count < PIPELINE_LINES for name, count in lines.items() if name.startswith("pipeline_"))


@pytest.mark.parametrize("family", FAMILIES)
def test_code_names_no_feature(family: str) -> None:
    named = [
        f"{file.name}: {line.strip()}"
        for file in code(family)
        for line in file.read_text(encoding="utf-8").splitlines()
        if FEATURES.search(line)
    ]
    assert not named


COMMON = re.compile(r"manual_seed|(?<!\w)(Schedule|State|SharedTables|Tables)\(|dynamic_shift|prompt_tokens\s*=")
"""What `pipeline/` does for every model: seeded noise, the schedule, states, shared modulation tables, token counts."""


@pytest.mark.parametrize("family", FAMILIES)
def test_code_repeats_nothing_that_is_common_to_all_models(family: str) -> None:
    """A class may derive from State; it is made by `new_state`."""
    repeated = [
        f"{file.name}: {line.strip()}"
        for file in code(family)
        for line in file.read_text(encoding="utf-8").splitlines()
        if COMMON.search(line) and not line.startswith("class ")
    ]
    assert not repeated


def test_the_common_part_is_found_where_it_is() -> None:
    found = set()
    for name in ("latent_diffusion", "image"):
        text = Path(omni_grpc.pipeline.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        found |= {match.group().split()[0] for match in COMMON.finditer(text)}
    assert {"manual_seed", "Schedule(", "SharedTables(", "dynamic_shift", "prompt_tokens"} <= found


def test_the_page_shows_a_pipeline_that_is_served() -> None:
    page = (ROOT.parent / "docs/adding-a-model.md").read_text(encoding="utf-8")
    (shown,) = [part.removeprefix("python\n") for part in page.split("```") if "(ImagePipeline):" in part]
    assert shown in (ROOT / "flux/pipeline_text_to_image.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line", ["if self.lora:", "LoraLinear()", "# the tea cache skips this", "TeaCache", "int8_linear", "ring_attention"]
)
def test_a_feature_is_recognised(line: str) -> None:
    assert FEATURES.search(line)


@pytest.mark.parametrize("line", ["torch.uint8", "ParallelSingleBlock", "floral, quantity", "string_", "self.blocks"])
def test_other_words_are_free(line: str) -> None:
    assert not FEATURES.search(line)


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_the_spec_loads_no_torch(family: str) -> None:
    code = f"import sys, omni_grpc.models.{family}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0
