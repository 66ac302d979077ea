"""Reads from a model what its author did not have to say, and says what is wrong with the rest."""

from __future__ import annotations

import enum
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

from sqlalchemy import Boolean, Column, ColumnElement, DateTime, Enum, Integer, String, Table
from sqlalchemy import inspect as sa_inspect
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.orm import Mapper, QueryableAttribute
from sqlalchemy.types import TypeDecorator, TypeEngine

from unstuck.decisions import MOST_STRIKES
from unstuck.errors import RegistrationError, nearest
from unstuck.identity import is_supported, stored_type

# The names under which applications keep these, most telling first.
STATUS_NAMES = {
    "queued": ("queued",),
    "processing": ("processing",),
    "completed": ("completed", "complete"),
    "failed": ("failed", "error"),
}
_ERROR_NAMES = ("error", "error_message", "last_error")
# What the database's clock can still be moved by.
_MOST_SECONDS = 1e9


class Reader:
    """Reads one model for one workflow; every refusal names the model and the parameter."""

    def __init__(self, model: type[Any]) -> None:
        self.model = model
        self.mapper = self._mapper()
        self._check_tables()
        self._check_key()

    def refuse(self, parameter: str, reason: str) -> RegistrationError:
        return RegistrationError(f"{self.model.__name__}: {parameter} {reason}.")

    def column(
        self, parameter: str, given: Any, kinds: type[TypeEngine[Any]] | None = None
    ) -> Column[Any]:
        """The column behind an attribute's name, a column's name, or the attribute itself."""
        name = str(getattr(given, "key", given))
        by_name = {column.name: column for column in self._columns.values()}
        found = self._columns.get(name, by_name.get(name))
        if found is None:
            raise self.refuse(
                f"{parameter}={name!r}",
                f"is not one of its columns: {nearest(name, self._columns)}",
            )
        if kinds is not None and not _holds(found, kinds):
            raise self.refuse(
                f"{parameter}={name!r}",
                f"is of type {_kind(found)}, but a {kinds.__name__} column is needed: "
                f"{nearest(name, self._names_of(kinds))}",
            )
        return found

    def has_column(self, name: str) -> bool:
        return name in self._columns

    def status(self, given: Any) -> Column[Any]:
        found = self.column("status", given)
        if not isinstance(stored_type(found.type), String | Integer):
            names = [*self._names_of(Enum), *self._names_of(String)]
            raise self.refuse(
                f"status={found.key!r}",
                f"is of type {_kind(found)}, but an Enum or String column is needed: "
                f"{nearest(str(found.key), names)}",
            )
        return found

    def infer_status(self) -> Column[Any]:
        """The column named status, or else the only Enum that has a Processing."""
        if "status" in self._columns:
            return self.status("status")
        columns = self._columns.values()
        enums = [c for c in columns if self.find_value(c, "processing") is not None]
        if len(enums) != 1:
            names = ", ".join(self._columns)
            raise self.refuse("status=", f"cannot be inferred; name its column: {names}")
        return enums[0]

    def infer_value(self, column: Column[Any], parameter: str) -> Any:
        found = self.find_value(column, parameter)
        if found is None:
            known = ", ".join(_labels(column)) or f"a column of type {_kind(column)}"
            raise self.refuse(f"{parameter}=", f"cannot be inferred from {column.name} ({known})")
        return found

    def infer_error(self, status: Column[Any]) -> Column[Any] | None:
        """`x_error` for `x_status`, or else the usual names."""
        key = self.mapper.get_property_by_column(status).key
        twin = (key.removesuffix("status") + "error",) if key.endswith("_status") else ()
        for name in (*twin, *_ERROR_NAMES):
            column = self._columns.get(name)
            if column is not None and _holds(column, String):
                return column
        return None

    def infer_updated_at(self) -> Column[Any] | None:
        column = self._columns.get("updated_at")
        return column if column is not None and _holds(column, DateTime) else None

    def value(self, parameter: str, column: Column[Any], given: Any) -> Any:
        """A status as the host's mapping takes it."""
        kind = column.type
        if isinstance(kind, TypeDecorator):
            return given
        if not isinstance(kind, Enum):
            return given.value if isinstance(given, enum.Enum) else given
        choices = _choices(kind)
        if kind.enum_class is not None and isinstance(given, kind.enum_class):
            return given
        wanted = (given.name, given.value) if isinstance(given, enum.Enum) else (given,)
        for label, choice in choices.items():
            if label in wanted or getattr(choice, "value", choice) in wanted:
                return choice
        raise self.refuse(
            f"{parameter}={wanted[0]!r}",
            f"is not a value of {column.name}: {nearest(str(wanted[0]), choices)}",
        )

    def seconds(self, parameter: str, given: Any, *, zero: bool) -> float:
        value = given.total_seconds() if isinstance(given, timedelta) else given
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{parameter}={given!r}", "must be a timedelta or seconds")
        if not (0 <= value <= _MOST_SECONDS) or (value == 0 and not zero):
            least = "0 or more" if zero else "more than 0"
            rule = f"must be {least} and at most {_MOST_SECONDS:.0f} seconds"
            raise self.refuse(f"{parameter}={given!r}", rule)
        return float(value)

    def whole(self, parameter: str, given: Any) -> int:
        if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MOST_STRIKES:
            return given
        rule = f"must be a whole number from 0 to {MOST_STRIKES}"
        raise self.refuse(f"{parameter}={given!r}", rule)

    def reapable(self, given: Any) -> bool | Column[Any] | Callable[[Any], Any]:
        if isinstance(given, bool):
            return given
        if isinstance(given, str | Column | QueryableAttribute):
            return self.column("reapable", given, Boolean)
        if callable(given):
            return given  # type: ignore[no-any-return]
        raise self.refuse(
            f"reapable={given!r}", "must be a bool, a column, or a callable that gives SQL"
        )

    def backoff(self, given: Any) -> tuple[float, float | None]:
        """A first wait, or the first and the longest."""
        pair = given if isinstance(given, tuple) else (given, None)
        if len(pair) != 2:
            raise self.refuse(f"backoff={given!r}", "must be the first wait, or (first, longest)")
        base = self.seconds("backoff", pair[0], zero=True)
        most = None if pair[1] is None else self.seconds("backoff", pair[1], zero=True)
        if most is not None and most < base:
            raise self.refuse(f"backoff={given!r}", "must not have its longest below its first")
        return base, most

    def _mapper(self) -> Mapper[Any]:
        try:
            inspected = sa_inspect(self.model)
        except NoInspectionAvailable:
            inspected = None
        if not isinstance(inspected, Mapper):
            raise RegistrationError(
                f"{self.model!r} is not a mapped class; register it after SQLAlchemy has mapped it."
            )
        return inspected

    def _check_tables(self) -> None:
        sources = (mapper.local_table for mapper in self.mapper.iterate_to_root())
        if not all(isinstance(source, Table) for source in sources):
            raise self.refuse("the model", "is mapped to a query; only tables can be recovered")

    def _check_key(self) -> None:
        for column in self.mapper.primary_key:
            if not is_supported(column):
                raise self.refuse(
                    f"the primary key {column.name!r}",
                    f"is of type {_kind(column)}; integers, UUIDs and strings can be recovered",
                )

    def find_value(self, column: Column[Any], parameter: str) -> Any:
        if not isinstance(column.type, Enum):
            return None
        choices = {label.casefold(): choice for label, choice in _choices(column.type).items()}
        found = (choices.get(name) for name in STATUS_NAMES[parameter])
        return next((choice for choice in found if choice is not None), None)

    @cached_property
    def _columns(self) -> dict[str, Column[Any]]:
        """By the attribute's name; what a mapping computes is not a column to write to."""
        mapped: dict[str, ColumnElement[Any]] = dict(self.mapper.columns.items())
        return {key: column for key, column in mapped.items() if isinstance(column, Column)}

    def _names_of(self, kinds: type[TypeEngine[Any]]) -> list[str]:
        return [name for name, column in self._columns.items() if _holds(column, kinds)]


def _choices(kind: Enum) -> dict[str, Any]:
    if kind.enum_class is not None:
        return dict(kind.enum_class.__members__)
    return {label: label for label in kind.enums}


def _labels(column: Column[Any]) -> list[str]:
    return list(_choices(column.type)) if isinstance(column.type, Enum) else []


def _holds(column: Column[Any], kinds: type[TypeEngine[Any]]) -> bool:
    """To SQLAlchemy an Enum is a String; to whoever writes a message into it, it is not."""
    kind = stored_type(column.type)
    return isinstance(kind, kinds) and (kinds is not String or not isinstance(kind, Enum))


def _kind(column: ColumnElement[Any]) -> str:
    return type(column.type).__name__
