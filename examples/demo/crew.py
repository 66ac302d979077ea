"""The processes of the demo: real ones, really killed, and none of them there when it ends."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from examples.demo.place import Place

ROOT = Path(__file__).parents[2]
# Seconds for a process to end when it is told to; then it is killed.
_PATIENCE = 10.0
_LAST_WORDS = 3000


class EndedByItself(Exception):
    """A process that nobody had told to end."""


@dataclass(eq=False)
class Member:
    name: str
    process: subprocess.Popen[bytes]
    log_file: Path
    may_end: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def is_gone(self) -> bool:
        return self.process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        self.may_end = self.may_end or number in (signal.SIGKILL, signal.SIGTERM)
        self.process.send_signal(number)


class Crew:
    """Starts processes, and ends them all when it is left."""

    def __init__(self, place: Place) -> None:
        self._folder = place.folder
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBIE_")}
        self._environment = {**inherited, **place.environment, "PYTHONPATH": str(ROOT)}
        self._members: list[Member] = []

    def start(self, module: str, name: str, *arguments: str) -> Member:
        log_file = self._folder / f"{name}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"examples.demo.{module}", *arguments],
                cwd=self._folder,  # where no .env of yours is
                env=self._environment,
                stdin=subprocess.PIPE,  # see parent.py
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends the others
            )
        member = Member(name, process, log_file)
        self._members.append(member)
        return member

    def check(self) -> None:
        for member in self._members:
            if member.is_gone and not member.may_end:
                raise EndedByItself(
                    f"{member.name} ended by itself with {member.process.returncode}; it said "
                    f"last:\n{member.log[-_LAST_WORDS:]}"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for member in self._members:
                member.send(signal.SIGTERM)
                member.send(signal.SIGCONT)  # what is frozen does not hear the other
            deadline = time.monotonic() + _PATIENCE
            for member in self._members:
                member.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for member in self._members:
                member.process.kill()
                member.process.wait()
                assert member.process.stdin is not None
                member.process.stdin.close()
