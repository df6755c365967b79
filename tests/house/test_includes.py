"""The check that C++ files include what they use finds what was planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import includes_check

USES_SYSTEM_ERROR = """
bool runs(void (*work)()) {
  try {
    work();
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}
"""


@pytest.fixture
def cleaner() -> str:
    found = includes_check.find_cleaner()
    if found is None:
        pytest.skip("no clang-include-cleaner (make setup installs it)")
    return found


def wrong(cleaner: str, source: Path, text: str) -> list[str]:
    source.write_text(text, encoding="utf-8")
    return includes_check.wrong_includes(cleaner, source, includes_check.flags(source, None, ""))


def test_a_missing_include_is_found(cleaner: str, tmp_path: Path) -> None:
    source = tmp_path / "planted.cpp"
    assert wrong(cleaner, source, "#include <system_error>\n" + USES_SYSTEM_ERROR) == []
    # mutex brings system_error along with this standard library, so a compiler finds nothing
    findings = wrong(cleaner, source, "#include <mutex>\n" + USES_SYSTEM_ERROR)
    assert findings == ["includes mutex and uses nothing of it", "uses system_error and does not include it"]


def test_a_header_is_judged_by_itself(cleaner: str, tmp_path: Path) -> None:
    assert wrong(cleaner, tmp_path / "planted.h", "#pragma once\n#include <mutex>\nstd::string name();\n") == [
        "includes mutex and uses nothing of it",
        "uses string and does not include it",
    ]


def test_a_file_that_clang_cannot_read_is_a_finding(cleaner: str, tmp_path: Path) -> None:
    (finding,) = wrong(cleaner, tmp_path / "planted.cpp", "int broken( {\n")
    assert "clang cannot read it" in finding
    assert "error: " in finding


def test_clang_with_libcxx_compiles_it_too(tmp_path: Path) -> None:
    compiler = includes_check.find_clang()
    if compiler is None:
        pytest.skip("no clang++ with libc++ (tools/ci_packages.sh installs it)")
    source = tmp_path / "planted.cpp"
    options = includes_check.flags(source, None, "")
    source.write_text("#include <string>\nstd::string name() { return {}; }\n", encoding="utf-8")
    assert includes_check.compile_errors(compiler, source, options) == []
    source.write_text("#include <cstddef>\nstd::string name() { return {}; }\n", encoding="utf-8")
    (finding,) = includes_check.compile_errors(compiler, source, options)
    assert "planted.cpp:2" in finding


def test_without_clang_it_says_that_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(includes_check, "find_cleaner", lambda: None)
    monkeypatch.setattr(includes_check, "find_clang", lambda: None)
    assert includes_check.main([]) == 0
    assert capsys.readouterr().out.count("SKIPPED") == 2
