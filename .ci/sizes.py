"""Sizes that one reading can hold: of a file, a stage and a function. Exits 1 above one of them."""

import ast
import subprocess
from pathlib import Path

FILE, STAGE, FUNCTION = 400, 150, 60


def faults(path: Path) -> list[str]:
    """What is too long in a file; names of functions with their lines."""
    text = path.read_text()
    most = STAGE if path.parent == Path("jobs") else FILE
    length = len(text.splitlines())
    found = []
    if length > most:
        found.append(f"{path}: {length} lines, at most {most}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION:
                found.append(
                    f"{path}:{node.lineno}: {node.name}, {length} lines, at most {FUNCTION}"
                )
    return found


if __name__ == "__main__":
    files = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)
    paths = [path for path in map(Path, files.stdout.split()) if path.exists()]
    wrong = [fault for path in paths for fault in faults(path)]
    print("\n".join(wrong) or f"{len(paths)} files: none is too long, no function is")
    raise SystemExit(bool(wrong))
