"""What a worker says to its test."""

from multiprocessing.connection import Connection
from typing import Any


class _Wire:
    to_test: Connection | None = None


def connect(to_test: Connection) -> None:
    _Wire.to_test = to_test


def say(**words: Any) -> None:
    assert _Wire.to_test is not None
    _Wire.to_test.send(words)
