"""What javac does not check of the house rules: sizes of files and methods, plain ASCII, imports that nothing uses.

python3 check_style.py FILE...
"""

import re
import sys
from pathlib import Path

MAX_LINES, MAX_METHOD, MAX_WIDTH = 499, 79, 120
METHOD = re.compile(r"^( {4}| {8})(?! )[^=;@*/]*\)( throws [\w, ]+)? \{$")


def faults(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    found = [f"{path}: {len(lines)} lines"] if len(lines) > MAX_LINES else []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if len(line) > MAX_WIDTH:
            found.append(f"{where}: {len(line)} characters")
        if not line.isascii() or "\t" in line or line != line.rstrip():
            found.append(f"{where}: not plain ASCII, a tab, or blanks at the end")
        used = re.fullmatch(r"import (?:static )?[\w.]+\.(\w+);", line)
        if used and not re.search(rf"\b{used[1]}\b", re.sub(r"(?m)^import .*$", "", text)):
            found.append(f"{where}: {used[1]} is not used")
        if method := METHOD.match(line):
            end = next(i for i, rest in enumerate(lines[number:]) if rest.startswith(method[1] + "}"))
            if end + 2 > MAX_METHOD:
                found.append(f"{where}: a method of {end + 2} lines")
    if not text.endswith("\n"):
        found.append(f"{path}: no line end at the end")
    imports = [line for line in lines if line.startswith("import ")]
    if imports != sorted(imports, key=lambda line: (not line.startswith("import static "), line.rstrip(";"))):
        found.append(f"{path}: imports are not sorted")
    return found


if __name__ == "__main__":
    wrong = [fault for name in sys.argv[1:] for fault in faults(Path(name))]
    sys.stdout.write("".join(f"{fault}\n" for fault in wrong))
    sys.exit(bool(wrong))
