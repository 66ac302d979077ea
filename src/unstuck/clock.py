"""Time and chance as the database sees them.

Application clocks differ and `now()` is the one clock that all replicas share, so no Python
datetime is ever bound into a staleness predicate. PostgreSQL compares naive and aware columns alike
because every transaction of unstuck sets its own TimeZone; SQLite has only text, which `julianday`
reads in every form that applications store.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, DateTime, Float
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

# Six digits of a second, as SQLAlchemy stores a DateTime on SQLite.
_SQLITE_FORMAT = "'%Y-%m-%d %H:%M:%f000'"
_SECONDS_A_DAY = "86400.0"


class now(FunctionElement[Any]):
    """The database's time at the start of this transaction."""

    type = DateTime(timezone=True)
    inherit_cache = True


class later(FunctionElement[Any]):
    """That many seconds after `now`."""

    type = DateTime(timezone=True)
    inherit_cache = True


class older_than(FunctionElement[bool]):
    """Whether a time lies more than that many seconds before `now`; false for NULL."""

    type = Boolean()
    inherit_cache = True


class not_after(FunctionElement[bool]):
    """Whether the first time is not after the second; NULL where either is."""

    type = Boolean()
    inherit_cache = True


class seconds_since(FunctionElement[float]):
    """Seconds from a time to `now`."""

    type = Float()
    inherit_cache = True


class latest(FunctionElement[Any]):
    """The greatest of several times, none of them NULL."""

    type = DateTime(timezone=True)
    inherit_cache = True


class chance(FunctionElement[float]):
    """A random number from 0 up to 1, drawn anew for each row."""

    type = Float()
    inherit_cache = True


def _arguments(element: FunctionElement[Any], compiler: SQLCompiler, **kw: Any) -> list[str]:
    return [compiler.process(clause, **kw) for clause in element.clauses]


@compiles(now)
def _now(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return "now()"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return f"strftime({_SQLITE_FORMAT}, 'now')"


@compiles(later)
def _later(element: later, compiler: SQLCompiler, **kw: Any) -> str:
    (seconds,) = _arguments(element, compiler, **kw)
    return f"(now() + make_interval(secs => {seconds}))"


@compiles(later, "sqlite")
def _later_sqlite(element: later, compiler: SQLCompiler, **kw: Any) -> str:
    (seconds,) = _arguments(element, compiler, **kw)
    return f"strftime({_SQLITE_FORMAT}, 'now', ({seconds}) || ' seconds')"


@compiles(older_than)
def _older_than(element: older_than, compiler: SQLCompiler, **kw: Any) -> str:
    time, seconds = _arguments(element, compiler, **kw)
    return f"({time} < now() - make_interval(secs => {seconds}))"


@compiles(older_than, "sqlite")
def _older_than_sqlite(element: older_than, compiler: SQLCompiler, **kw: Any) -> str:
    time, seconds = _arguments(element, compiler, **kw)
    return f"(julianday({time}) < julianday('now') - {seconds} / {_SECONDS_A_DAY})"


@compiles(not_after)
def _not_after(element: not_after, compiler: SQLCompiler, **kw: Any) -> str:
    first, second = _arguments(element, compiler, **kw)
    return f"({first} <= {second})"


@compiles(not_after, "sqlite")
def _not_after_sqlite(element: not_after, compiler: SQLCompiler, **kw: Any) -> str:
    first, second = _arguments(element, compiler, **kw)
    return f"(julianday({first}) <= julianday({second}))"


@compiles(seconds_since)
def _seconds_since(element: seconds_since, compiler: SQLCompiler, **kw: Any) -> str:
    (time,) = _arguments(element, compiler, **kw)
    # PostgreSQL 16 cannot subtract -infinity, and no row may stop a sweep.
    return f"date_part('epoch', now() - greatest({time}, '0001-01-01'))"


@compiles(seconds_since, "sqlite")
def _seconds_since_sqlite(element: seconds_since, compiler: SQLCompiler, **kw: Any) -> str:
    (time,) = _arguments(element, compiler, **kw)
    return f"((julianday('now') - julianday({time})) * {_SECONDS_A_DAY})"


@compiles(latest)
def _latest(element: latest, compiler: SQLCompiler, **kw: Any) -> str:
    return f"greatest({', '.join(_arguments(element, compiler, **kw))})"


@compiles(latest, "sqlite")
def _latest_sqlite(element: latest, compiler: SQLCompiler, **kw: Any) -> str:
    return f"max({', '.join(_arguments(element, compiler, **kw))})"


@compiles(chance)
def _chance(element: chance, compiler: SQLCompiler, **kw: Any) -> str:
    return "random()"


@compiles(chance, "sqlite")
def _chance_sqlite(element: chance, compiler: SQLCompiler, **kw: Any) -> str:
    return "(abs(random() % 1000000) / 1000000.0)"
