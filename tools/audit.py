"""Looks for secrets in the files of git, and where asked for known vulnerabilities in what is installed. `make audit`
runs it.

    python tools/audit.py                      secrets
    python tools/audit.py --vulnerabilities    vulnerabilities too: one question about each installed package
    python tools/audit.py --accept             what looks like a secret now is none: writes .secrets.baseline

Secrets are those that detect-secrets finds and .secrets.baseline does not list. pip-audit asks a vulnerability service;
where that does not answer, or knows none of the packages (a mirror may lack it), the line says "skipped" and why, and
nothing fails. A vulnerability fails the check if there is a version without it, and is named otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
BASELINE = ".secrets.baseline"
SERVICE_SECONDS = "15"
NOT_ASKED = "vulnerabilities: not asked for; `make audit ARGS=--vulnerabilities` asks a service about each package"

Scan = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--accept", action="store_true", help=f"write {BASELINE} instead of comparing with it")
    parser.add_argument(
        "--vulnerabilities",
        action="store_true",
        help="also ask the vulnerability service about every installed package",
    )
    options = parser.parse_args()
    if options.accept:
        (ROOT / BASELINE).write_text(json.dumps(kept(scan(ROOT)), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"secrets: wrote {BASELINE}: look at what `git diff` shows of it")
        return 0
    found = list(new_secrets(scan(ROOT), json.loads((ROOT / BASELINE).read_text(encoding="utf-8"))))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"secrets: {len(found)} that {BASELINE} does not list" if found else "secrets: none")
    failed, said = vulnerabilities(*ask()) if options.vulnerabilities else (False, NOT_ASKED)
    print(said)
    return 1 if found or failed else 0


def scan(folder: Path) -> Scan:
    """What detect-secrets finds in the files that git tracks."""
    # records name commits, whose digits look like a key; what is generated for the page has descriptors in base64
    leave_out = (
        rf"(^|/)(\{BASELINE}$|benchmarks/results/|clients/(web|typescript)/src/gen/|omni_grpc/web/page/app\.js$)"
    )
    command = [str(BIN / "detect-secrets"), "-C", str(folder), "scan", "--exclude-files", leave_out]
    found = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)
    return {
        "version": found["version"],
        "results": {
            name: [{key: one[key] for key in ("type", "hashed_secret", "line_number")} for one in secrets]
            for name, secrets in found["results"].items()
        },
    }


def kept(found: Scan) -> Scan:
    """A scan without line numbers, which change with every edit."""
    results = found["results"].items()
    return {name: sorted({one["hashed_secret"] for one in secrets}) for name, secrets in results}


def new_secrets(found: Scan, known: Scan) -> Iterator[str]:
    """A line for each that is not known, by file and hash."""
    for name, secrets in found["results"].items():
        for one in secrets:
            if one["hashed_secret"] not in known.get(name, ()):
                yield (
                    f"{name}:{one['line_number']}: {one['type']}: take it out and revoke it; if it is none, write "
                    "`pragma: allowlist secret` in a comment beside it"
                )


def ask() -> tuple[str, str]:
    """What pip-audit prints as JSON, and what it says otherwise."""
    command = [str(BIN / "pip-audit"), "--local", "--skip-editable", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run([*command, "--timeout", SERVICE_SECONDS], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def vulnerabilities(answer: str, errors: str) -> tuple[bool, str]:
    """Whether the check fails, and what is to be said."""
    try:
        packages = json.loads(answer)["dependencies"]
    except ValueError:
        why = (errors.strip() or "it printed nothing").splitlines()[-1]
        return False, f"vulnerabilities: skipped: pip-audit had no answer from the vulnerability service: {why}"
    asked = [one for one in packages if "skip_reason" not in one]
    if not asked:
        return False, f"vulnerabilities: skipped: the vulnerability service knows none of {len(packages)} packages"
    lines, failed = [], False
    for one in asked:
        for found in one["vulns"]:
            mended = found["fix_versions"]
            failed |= bool(mended)
            fix = f"install {one['name']} {' or '.join(mended)}" if mended else "no version is without it yet"
            lines.append(f"{one['name']} {one['version']}: {found['id']}: {fix}")
    rest = len(packages) - len(asked)
    lines.append(f"vulnerabilities: {len(lines)} in {len(asked)} packages" + (f"; {rest} were skipped" if rest else ""))
    return failed, "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
