"""What `make house` counts, on a small package."""

from __future__ import annotations

from pathlib import Path

from tools.house_figures import figures

FILES = {
    "omni_grpc/__init__.py": "",
    "omni_grpc/loose.py": "from omni_grpc.engine import run\n\n\nclass Rows: ...\n",
    "omni_grpc/v1/stub.py": "class Rows: ...\n",
    "omni_grpc/engine/run.py": "import omni_grpc.models.tiny\nfrom ..loose import Rows\n\nclass _Rows: ...\n",
    "models/tiny/model.py": '''
class Rows:
    def forward(self, x: torch.Tensor) -> Tensor:
        """Returns the rows."""
    def shaped(self, x: Tensor | None) -> Tensor:
        """Takes x [tokens, channels]."""
    def bare(self, x: Tensor) -> None: ...
    def _private(self, x: Tensor) -> None: ...
    def size(self) -> int: ...
''',
}


def test_the_figures_of_a_small_package(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = figures(tmp_path)
    assert found["loose files in omni_grpc/"] == ["loose.py"]
    assert found["rooms"] == ["engine", "loose", "models"]
    assert found["arrows between rooms"] == ["engine -> loose", "engine -> models", "loose -> engine"]
    assert found["pairs of rooms that import each other"] == ["engine, loose"]
    assert found["lines of omni_grpc/"] == 8
    assert found["type names with more than one definition"] == ["Rows: omni_grpc/loose.py, models/tiny/model.py"]
    assert len(found["public functions that take a tensor"]) == 3
    assert found["public functions that take a tensor, without a docstring"] == ["models/tiny/model.py:7 Rows.bare"]
    assert found["public functions that take a tensor, whose docstring gives no shape"] == [
        "models/tiny/model.py:3 Rows.forward"
    ]
    assert found["functions of 80 lines or more"] == []
