import ast
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import unstuck

PACKAGE = Path(unstuck.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 350
LONGEST_FUNCTION = 45

SURFACE = [
    "Claim",
    "ClaimLost",
    "Compensate",
    "Observer",
    "RegistrationError",
    "Registry",
    "Unstuck",
    "UnstuckError",
    "ZombieSettings",
    "cleanup_zombie_records",
    "configure",
    "heartbeat",
    "metadata",
    "recoverable",
    "registry",
    "run_job_loop",
    "setup_zombie_cleanup_scheduler",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(module: Path) -> list[Function]:
    tree = ast.parse(module.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def test_the_public_names_are_these_and_no_more() -> None:
    assert unstuck.__all__ == SURFACE
    for name in SURFACE:
        assert getattr(unstuck, name) is not None


def test_a_star_import_brings_the_public_names_and_no_more() -> None:
    brought: dict[str, object] = {}
    exec("from unstuck import *", brought)
    assert sorted(brought.keys() - {"__builtins__"}) == SURFACE


def test_the_public_names_are_documented() -> None:
    undocumented = [n for n in SURFACE if n != "metadata" and not getattr(unstuck, n).__doc__]
    assert undocumented == []


def test_an_import_says_nothing_and_touches_nothing(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import unstuck"],
        cwd=tmp_path,
        env={"ZOMBIE_CLEANUP_INTERVAL_MINUTES": "nonsense"},  # read at set-up, not before
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_package_is_typed() -> None:
    assert files("unstuck").joinpath("py.typed").is_file()


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_module_is_short_and_imports_at_its_top(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= LONGEST_FILE
    for function in functions_of(module):
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < LONGEST_FUNCTION, function.name
        inner = [n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert inner == [], function.name
