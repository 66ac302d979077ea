"""Everything that can go wrong, in words that say what, where and how to mend it.

UnstuckError
├── RegistrationError       a model or a parameter that cannot be registered
├── SettingsError           a configuration that cannot work
├── SessionUnavailable      the session source failed, or gave no session
├── TablesMissing           unstuck's own tables are not in this database
├── UnsupportedDatabase     neither PostgreSQL nor SQLite
├── UnknownWorkflow         no workflow of that name is registered
├── UnknownRecord           no such record, or not a key of its table
├── WrongState              the record is not in the status that the decision is for
├── ClaimLost               the claim was taken away while its worker still ran
└── NoSpool                 what could not be written to the database cannot be kept either
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# SQLAlchemy 2.0 puts the class of asyncpg's error before its message.
_CLASS = re.compile(r"^<class '[\w.]+'>: ")
# user:password@ of a URL, up to the last @ of the word; and password=... of a DSN or a query.
_SECRETS = (
    (re.compile(r"(?<=://)([^\s:/@]*):\S*(?=@)"), r"\1:***"),
    (re.compile(r"(?i)(passw(?:or)?d|pwd)(\W?\s?[=:]\s?)(['\"])(?!\*{3}).*?\3"), r"\1\2\3***\3"),
    (
        re.compile(r"(?i)(passw(?:or)?d|pwd)(?!\W{2,4}\*)(\W{0,2}[=:]\W{0,2})[^\s'\"&,;}]+"),
        r"\1\2***",
    ),
)


class UnstuckError(Exception):
    """Base of every error that unstuck raises on purpose."""


class RegistrationError(UnstuckError):
    """A model or a parameter that cannot be registered for recovery."""


class SettingsError(UnstuckError, ValueError):
    """A configuration that cannot work."""


class SessionUnavailable(UnstuckError):
    """The session source failed, or gave no session."""


class UnsupportedDatabase(UnstuckError):
    """Neither PostgreSQL nor SQLite."""

    def __init__(self, dialect: str) -> None:
        super().__init__(
            f"unstuck works on PostgreSQL and SQLite; this session is bound to {dialect!r}."
        )


class TablesMissing(UnstuckError):
    """unstuck's own tables are not in this database."""

    def __init__(self) -> None:
        super().__init__(
            "The tables zombie_claims, zombie_records and zombie_events are missing or out of "
            "date in this database: pass create_tables=True to setup_zombie_cleanup_scheduler(), "
            "await Unstuck(...).create_tables(), or add unstuck.metadata to your migrations."
        )


class UnknownWorkflow(UnstuckError):
    """No workflow of that name is registered."""


class UnknownRecord(UnstuckError):
    """No such record, or not a key of its table."""


class WrongState(UnstuckError):
    """The record is not in the status that the decision is for; nothing was changed."""


class ClaimLost(UnstuckError):
    """The claim was taken away while its worker still ran."""

    def __init__(self, label: str) -> None:
        super().__init__(f"The claim to {label} was lost; nothing more is written for it.")


class NoSpool(UnstuckError):
    """The spool cannot be read or written."""


def nearest(wrong: str, choices: Iterable[str]) -> str:
    """The list of choices as a sentence, led by the one that was probably meant."""
    names = sorted(choices)
    listing = ", ".join(names) if names else "none"
    close = closest(wrong, names)
    return f"did you mean {close!r}? There are: {listing}" if close else listing


def closest(wrong: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant."""
    folded = {name.casefold(): name for name in choices}
    close = difflib.get_close_matches(wrong.casefold(), folded, n=1, cutoff=0.5)
    return folded[close[0]] if close else None


def describe(error: BaseException) -> str:
    """An error in one line, without its SQL and without the passwords that database URLs carry."""
    root = getattr(error, "orig", None) or error
    lines = _CLASS.sub("", str(root).strip()).splitlines()
    return mask(lines[0]) if lines else type(root).__name__


def explain(error: BaseException) -> str:
    """An error in its own words, as a text column can take them; one of the database's in a line,
    for its words repeat the SQL and the values."""
    if getattr(error, "orig", None) is not None:
        return describe(error)
    return mask(_storable(str(error).strip())) or type(error).__name__


def _storable(text: str) -> str:
    """No column takes a NUL or half of a surrogate pair."""
    return text.replace("\0", "").encode(errors="replace").decode()


def mask(text: str) -> str:
    for secret, hidden in _SECRETS:
        text = secret.sub(hidden, text)
    return text
