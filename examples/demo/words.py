"""Says in words what the ledger has of an invoice."""

from collections.abc import Iterable

from examples.demo.sight import Entry, Seen

_BY_CAUSE = {
    ("zombie", "lost_heartbeat"): "{worker} fell silent, strike {strikes}",
    ("zombie", "never_started"): "{worker} never began",
    ("attempt", "shutdown"): "{worker} was stopped",
    ("attempt", "no_session"): "{worker} had no session",
    ("returned", "shutdown"): "{worker} gave it back: shutdown",
    ("returned", "no_session"): "{worker} gave it back: no sessions",
}
_BY_KIND = {
    "retried": "retried by {by}",
    "late_start": "{worker} was too late",
    "late_finish": "{worker} was too late: refused",
    "late_failure": "{worker} was too late: refused",
}


def tell(entry: Entry) -> str:
    """One entry, and who or what was behind it."""
    if entry.kind == "attempt" and entry.outcome == "completed":
        return f"{entry.worker} completed it"
    known = _BY_CAUSE.get((entry.kind, entry.cause or "")) or _BY_KIND.get(entry.kind)
    if known is None:
        said = (entry.worker, entry.kind, entry.cause, entry.outcome, entry.data.get("error"))
        return " ".join(str(word) for word in said if word)
    words = known.format(worker=entry.worker, strikes=entry.strikes, by=entry.data.get("by"))
    return f"{words} (spooled)" if entry.data.get("spooled") else words


def tell_way(invoice: Seen, entries: Iterable[Entry]) -> str:
    """All that happened to an invoice, and where it is now."""
    parts = [tell(entry) for entry in entries]
    if invoice.owner is not None:
        parts.append(f"{'in work' if invoice.at_work else 'claimed'} by {invoice.owner}")
    return " · ".join(parts)
