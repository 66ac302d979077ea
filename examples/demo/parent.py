"""Ends a process together with the one that started it, however that one ends.

The parent holds the other end of our standard input, and never writes. When it is gone, even by
SIGKILL, the pipe closes: nothing that the demo started outlives it.
"""

import os
import threading

_STDIN = 0


def end_with_parent() -> None:
    threading.Thread(target=_wait, name="parent", daemon=True).start()


def _wait() -> None:
    while os.read(_STDIN, 1):
        pass
    os._exit(1)
