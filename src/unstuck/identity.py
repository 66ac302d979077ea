"""A record's primary key as text: the same in SQL and in Python, on every database.

Integers, UUIDs and strings are written as people write them; the parts of a composite key are
joined by commas, with commas and backslashes inside a part escaped by a backslash.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Dialect,
    Enum,
    Integer,
    String,
    Text,
    Uuid,
    cast,
    func,
    tuple_,
    type_coerce,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

Key = tuple[Any, ...]

_POSTGRESQL: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]


class uuid_text(FunctionElement[str]):
    """A UUID column as text with hyphens, also where the database stores it as bare hex."""

    type = Text()
    inherit_cache = True


@compiles(uuid_text)
def _uuid_text(element: uuid_text, compiler: SQLCompiler, **kw: Any) -> str:
    (column,) = element.clauses
    sql = compiler.process(column, **kw)
    kind = _type_on(compiler.dialect, column.type)
    if isinstance(kind, Uuid) and kind.native_uuid and compiler.dialect.supports_native_uuid:
        return f"CAST({sql} AS TEXT)"
    sql = f"replace({sql}, '-', '')"
    cuts = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    return "lower(" + " || '-' || ".join(f"substr({sql}, {at}, {n})" for at, n in cuts) + ")"


def stored_type(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """What a column holds, below the decorators that an application puts around it."""
    while isinstance(kind, TypeDecorator):
        kind = kind.impl_instance
    return kind


def is_supported(column: ColumnElement[Any]) -> bool:
    kind = stored_type(column.type)
    return isinstance(kind, Integer | Uuid | String) and not isinstance(kind, Enum)


def record_id(columns: Sequence[Column[Any]]) -> ColumnElement[str]:
    """The SQL expression for the text of a key."""
    parts = [_text(column) for column in columns]
    if len(parts) == 1:
        return parts[0]
    escaped = [func.replace(func.replace(part, "\\", "\\\\"), ",", "\\,") for part in parts]
    return reduce(lambda left, right: left.concat(",").concat(right), escaped)


def key_matches(columns: Sequence[Column[Any]], key: Key) -> list[ColumnElement[bool]]:
    return [comparable(column) == part for column, part in zip(columns, key, strict=True)]


def is_one_of(columns: Sequence[Column[Any]], keys: Any) -> ColumnElement[bool]:
    """Whether a row's key is among `keys`: a list from `as_list`, or an expanding parameter."""
    parts = [comparable(column) for column in columns]
    return parts[0].in_(keys) if len(parts) == 1 else tuple_(*parts).in_(keys)


def most_keys(columns: Sequence[Column[Any]], wanted: int) -> int:
    """How many keys fit into one statement, which takes no more than 32,767 parameters."""
    return min(wanted, 30_000 // len(columns))


def as_list(keys: Sequence[Key]) -> list[Any]:
    """Keys as SQL's IN takes them: bare values for a key of one column, tuples for more."""
    return [key[0] if len(key) == 1 else tuple(key) for key in keys]


def comparable(column: Column[Any]) -> ColumnElement[Any]:
    """The column, typed by what it stores, so that keys read from text can be compared to it."""
    kind = stored_type(column.type)
    if isinstance(kind, Uuid):
        return type_coerce(column, Uuid(native_uuid=kind.native_uuid))
    if isinstance(kind, Integer):
        return type_coerce(column, BigInteger())  # an id out of range is unknown, not an error
    # A decorator that makes UUIDs of text on PostgreSQL alone is the one to say how to bind them.
    return column if _is_uuid(column) else type_coerce(column, kind)


def write_key(columns: Sequence[Column[Any]], record: object) -> str:
    """The text of a key that a caller gave as a value, a tuple of values, or text."""
    return _join(read_key(columns, record))


def read_key(columns: Sequence[Column[Any]], record: object) -> Key:
    """The values of a key from its text (or from values); ValueError if it cannot be one."""
    if isinstance(record, str):
        parts: Sequence[object] = _split(record) if len(columns) > 1 else [record]
    elif isinstance(record, tuple | list):
        parts = record
    else:
        parts = [record]
    if len(parts) != len(columns):
        raise ValueError(f"{record!r} has {len(parts)} parts, the key has {len(columns)}")
    return tuple(_value(column, part) for column, part in zip(columns, parts, strict=True))


def _is_uuid(column: ColumnElement[Any]) -> bool:
    """Also where only a decorator knows: text in one database, a UUID in the other."""
    kinds = (stored_type(column.type), _type_on(_POSTGRESQL, column.type))
    return any(isinstance(kind, Uuid) for kind in kinds)


def _type_on(dialect: Dialect, kind: TypeEngine[Any]) -> TypeEngine[Any]:
    while isinstance(kind, TypeDecorator):
        kind = kind.load_dialect_impl(dialect)
    return kind


def _text(column: Column[Any]) -> ColumnElement[str]:
    if _is_uuid(column):
        return uuid_text(column)
    return cast(column, Text)


def _value(column: Column[Any], part: object) -> Any:
    if part is None:
        raise ValueError("no part of a key is None")
    if _is_uuid(column):
        return part if isinstance(part, UUID) else UUID(str(part))
    if isinstance(stored_type(column.type), Integer):
        return _whole(str(part))
    return str(part)


def _whole(text: str) -> int:
    """A key has one text: Python would also read 1_000, +5 and the digits of other scripts."""
    number = int(text)
    if str(number) != text or not -(2**63) <= number < 2**63:
        raise ValueError(f"{text!r} is not an integer as databases write it")
    return number


def _join(key: Key) -> str:
    if len(key) == 1:
        return str(key[0])
    return ",".join(str(part).replace("\\", "\\\\").replace(",", "\\,") for part in key)


def _split(text: str) -> list[str]:
    parts = [""]
    letters = iter(text)
    for letter in letters:
        if letter == ",":
            parts.append("")
        else:
            parts[-1] += next(letters, "") if letter == "\\" else letter
    return parts
