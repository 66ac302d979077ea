"""What one sees: a table that lives while it happens, or plain lines where there is no terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.demo.invoice import Status
from examples.demo.sight import Entry, Sight
from examples.demo.verdict import Verdict
from examples.demo.words import tell, tell_way

_COLOURS = {
    Status.Queued: "cyan",
    Status.Processing: "yellow",
    Status.Completed: "green",
    Status.Failed: "red",
}
_STATUS = max(len(status.name) for status in Status)
_LEADS_TO = {"completed": Status.Completed, "failed": Status.Failed, "requeued": Status.Queued}


class Screen(Protocol):
    def announce(self, words: str) -> None: ...

    def show(self, sight: Sight) -> None: ...

    def conclude(self, verdict: Verdict) -> None: ...


@contextmanager
def open_screen() -> Iterator[Screen]:
    console = Console()
    if not console.is_terminal:
        yield LineScreen()
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveScreen(live)


class LineScreen:
    """A line for every change, with who and why."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last = Sight()

    def announce(self, words: str) -> None:
        self._say(f"-- {words}")

    def show(self, sight: Sight) -> None:
        for entry in sight.entries[len(self._last.entries) :]:
            self._say_of(entry.invoice_id, _status_after(entry), tell(entry))
        before = {one.id: one for one in self._last.invoices}
        for one in sight.invoices:
            if one.owner is not None and one.owner != before.get(one.id, one).owner:
                self._say_of(one.id, one.status.name, f"claimed by {one.owner}")
        self._last = sight

    def conclude(self, verdict: Verdict) -> None:
        print(flush=True)
        for label, number in verdict.rows:
            print(f"{label:<30} {number}", flush=True)

    def _say_of(self, invoice_id: int, status: str, words: str) -> None:
        self._say(f"invoice {invoice_id:>2}  {status:<{_STATUS}}  {words}")

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self._began:5.1f} s  {words}", flush=True)


class LiveScreen:
    """A row for every invoice with its way so far, and below it what is being done to them."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._announced: list[str] = []
        self._last = Sight()

    def announce(self, words: str) -> None:
        self._announced.append(words)
        self.show(self._last)

    def show(self, sight: Sight) -> None:
        self._last = sight
        width, height = self._live.console.size
        room = max(1, height - len(sight.invoices) - 2)
        said = Text("\n".join(self._announced[-room:]), style="bold", no_wrap=True)
        self._live.update(Group(_draw(sight, width), said), refresh=True)

    def conclude(self, verdict: Verdict) -> None:
        self._live.stop()
        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right")
        colour = "bold green" if verdict.is_kept else "bold red"
        for label, number in verdict.rows:
            is_promise = (label, number) in verdict.rows[-2:]
            table.add_row(label, str(number), style=colour if is_promise else None)
        self._live.console.print(table)


def _draw(sight: Sight, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("invoice", justify="right")
    table.add_column("status", width=_STATUS)
    table.add_column("its way", ratio=1, no_wrap=True)
    for one in sight.invoices:
        status = Text(one.status.name, style=_COLOURS[one.status])
        way = tell_way(one, (entry for entry in sight.entries if entry.invoice_id == one.id))
        table.add_row(str(one.id), status, _shorten(way, width - len("invoice") - _STATUS - 6))
    return table


def _shorten(words: str, room: int) -> str:
    """At the front: what came last matters most."""
    return words if len(words) <= room else f"…{words[len(words) - room + 1 :]}"


def _status_after(entry: Entry) -> str:
    """What the invoice was from then on; nothing for what only was written down."""
    if entry.kind == "retried":
        return str(entry.data["new"])
    status = _LEADS_TO.get(entry.outcome or "")
    return status.name if status else ""
