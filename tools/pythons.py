"""Prints one interpreter for each supported Python version found on PATH or below pyenv."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
SAY_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def candidates() -> Iterator[Path]:
    for directory in os.get_exec_path():
        yield from (Path(directory) / f"python{version}" for version in SUPPORTED)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob("versions/*/bin/python3"))


def version_of(python: Path) -> str | None:
    """Asked of the interpreter itself: a pyenv shim exists even where its version does not."""
    try:
        answer = subprocess.run([python, "-c", SAY_VERSION], capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def main() -> None:
    found: dict[str | None, Path] = {}
    for python in candidates():
        found.setdefault(version_of(python), python)
    for version in SUPPORTED:
        if version in found:
            print(found[version])


if __name__ == "__main__":
    main()
