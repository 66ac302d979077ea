"""The demo, run as `make demo` runs it: real processes, really killed, and nothing left of them."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console
from rich.live import Live

from examples.demo.invoice import Status
from examples.demo.screen import LiveScreen
from examples.demo.sight import Entry, Seen, Sight
from examples.demo.verdict import Verdict

ROOT = Path(__file__).parents[2]
MINUTE = 60.0
PATIENCE = 15.0  # seconds for what was started to be gone
MARK = "UNSTUCK_DEMO_MARK"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the demo; all that it starts in turn inherits a mark, by which it is found again."""
    running: list[subprocess.Popen[str]] = []

    def start_demo(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        demo = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment, MARK: str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(demo)
        return demo

    yield start_demo
    for demo in running:
        demo.kill()
        demo.communicate()


def left_of(mark: Path) -> list[str]:
    """The processes that still bear the mark."""
    found = psutil.process_iter(["environ", "cmdline"])
    marked = [one for one in found if (one.info["environ"] or {}).get(MARK) == str(mark)]
    return [" ".join(one.info["cmdline"] or ()) for one in marked]


def read_until(demo: subprocess.Popen[str], words: str) -> str:
    """The demo's output up to the line with these words; its end is an end of the test as well."""
    assert demo.stdout is not None
    output = ""
    for line in demo.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(f"It never said {words!r}:\n{output}")


def count(output: str, label: str) -> int:
    """What the last table says."""
    found = re.search(rf"^{label} +(\d+)$", output, re.MULTILINE)
    assert found, output
    return int(found[1])


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_nothing_is_lost_and_nothing_is_run_twice(
    start: Start, database: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    demo = start("--database", database)
    output, _ = demo.communicate(timeout=MINUTE)
    assert demo.returncode == 0, output
    assert time.monotonic() - began < MINUTE
    assert left_of(tmp_path) == []
    assert count(output, "lost") == 0
    assert count(output, "run twice by two owners") == 0
    assert count(output, "completed") == count(output, "invoices")
    assert count(output, "brought back by the sweep") > 0
    assert count(output, "given back by their worker") > 0
    assert count(output, "failed for want of a session") > 0
    assert count(output, "late results refused") > 0


def test_a_broken_promise_is_an_error_also_when_the_application_went_on(start: Start) -> None:
    demo = start("--serve", "--break-promise")
    output = read_until(demo, "goes on at")
    assert count(output, "lost") == 0
    assert count(output, "run twice by two owners") == 1
    address = re.search(r"goes on at (http://[^/]+)", output)
    assert address
    invoices = httpx.get(f"{address[1]}/invoices", trust_env=False).raise_for_status().json()
    assert {invoice["status"] for invoice in invoices} == {"Completed"}
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 1


def test_an_interrupted_demo_leaves_nothing(start: Start, tmp_path: Path) -> None:
    demo = start(TMPDIR=str(tmp_path))
    read_until(demo, "SIGKILL in mid-batch")
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 130
    assert "Traceback" not in output
    assert left_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_demo_leaves_no_process(start: Start, tmp_path: Path) -> None:
    demo = start(TMPDIR=str(tmp_path))
    read_until(demo, "SIGKILL in mid-batch")
    demo.kill()
    demo.wait()
    deadline = time.monotonic() + PATIENCE
    while (left := left_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_terminal_shows_each_invoice_with_its_way_and_the_verdict() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=24)
    entries = [
        Entry(1, "zombie", "lost_heartbeat", "requeued", "worker-1", 1, {}),
        Entry(1, "attempt", None, "completed", "worker-2", None, {}),
        Entry(1, "late_finish", None, None, "worker-1", None, {}),
    ]
    invoices = [Seen(1, Status.Completed), Seen(2, Status.Processing, "worker-2", at_work=True)]
    with Live(console=console, auto_refresh=False) as live:
        screen = LiveScreen(live)
        screen.announce("1. worker-1 gets a SIGKILL")
        screen.show(Sight(tuple(invoices), tuple(entries)))
        screen.conclude(Verdict({"invoices": 2}, lost=1, twice=0))
    assert isinstance(console.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    way = "worker-1 fell silent, strike 1 · worker-2 completed it · worker-1 was too late: refused"
    assert f"1  Completed   {way}" in shown
    assert "2  Processing  in work by worker-2" in shown
    assert "1. worker-1 gets a SIGKILL" in shown
    assert re.search(r"lost +│ +1 │", shown)
