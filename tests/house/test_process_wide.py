"""Nothing that runs in a lane changes a setting of the whole process: another lane works meanwhile."""

import ast
from collections.abc import Iterator
from pathlib import Path

from .source import ROOT

PROCESS_WIDE = {
    "sdpa_kernel",
    "sdp_kernel",
    "enable_flash_sdp",
    "enable_mem_efficient_sdp",
    "enable_math_sdp",
    "enable_cudnn_sdp",
    "set_default_dtype",
    "set_default_device",
    "set_float32_matmul_precision",
    "use_deterministic_algorithms",
    "chdir",
    "setlocale",
}
FOLDERS = ("worker", "adapter", "features", "models", "pipeline", "loading", "nn", "ops")


def calls(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, node.lineno


def found(folder: Path) -> list[str]:
    return [
        f"{path}:{line} {name}"
        for path in sorted(folder.rglob("*.py"))
        for name, line in calls(path)
        if name in PROCESS_WIDE
    ]


def test_no_lane_changes_a_setting_of_the_process() -> None:
    assert [one for folder in FOLDERS for one in found(ROOT / "omni_grpc" / folder)] == []


def test_a_change_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("with torch.nn.attention.sdpa_kernel(1):\n    pass\n", encoding="utf-8")
    assert found(tmp_path) == [f"{tmp_path / 'x.py'}:1 sdpa_kernel"]
