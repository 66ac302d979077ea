"""Reads from a model what its author did not have to say, and says what is wrong with the rest."""

from __future__ import annotations

import enum
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import Boolean, Column, DateTime, Enum, String, Table
from sqlalchemy import inspect as sa_inspect
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.orm import Mapper
from sqlalchemy.types import TypeDecorator, TypeEngine

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
        found = self.mapper.columns.get(name)
        if found is None:
            by_name = {column.name: column for column in self.mapper.columns}
            found = by_name.get(name)
        if found is None:
            raise self.refuse(
                f"{parameter}={name!r}", f"is not one of its columns: {nearest(name, self._names)}"
            )
        if kinds is not None and not isinstance(stored_type(found.type), kinds):
            raise self.refuse(
                f"{parameter}={name!r}",
                f"is of type {found.type}, but a {kinds.__name__} column is needed",
            )
        return found

    def infer_status(self) -> Column[Any]:
        """The column named status, or else the only Enum that has a Processing."""
        if "status" in self.mapper.columns:
            return self.mapper.columns["status"]
        enums = [c for c in self.mapper.columns if self._infer_value(c, "processing") is not None]
        if len(enums) != 1:
            raise self.refuse("status=", f"cannot be inferred; name its column: {self._listing}")
        return enums[0]

    def infer_value(self, column: Column[Any], parameter: str) -> Any:
        found = self._infer_value(column, parameter)
        if found is None:
            known = ", ".join(_labels(column)) or f"a column of type {column.type}"
            raise self.refuse(f"{parameter}=", f"cannot be inferred from {column.name} ({known})")
        return found

    def infer_optional_value(self, column: Column[Any], parameter: str) -> Any:
        return self._infer_value(column, parameter)

    def infer_error(self, status: Column[Any]) -> Column[Any] | None:
        """`x_error` for `x_status`, or else the usual names."""
        key = self.mapper.get_property_by_column(status).key
        twin = (key.removesuffix("status") + "error",) if key.endswith("_status") else ()
        for name in (*twin, *_ERROR_NAMES):
            column = self.mapper.columns.get(name)
            if column is not None and isinstance(stored_type(column.type), String):
                return column
        return None

    def infer_updated_at(self) -> Column[Any] | None:
        column = self.mapper.columns.get("updated_at")
        return column if column is not None and _is_time(column) else None

    def value(self, parameter: str, column: Column[Any], given: Any) -> Any:
        """A status as the host's mapping takes it."""
        kind = column.type
        if isinstance(kind, TypeDecorator):
            return given
        if not isinstance(kind, Enum):
            return given.value if isinstance(given, enum.Enum) else given
        choices = _choices(kind)
        wanted = given.name if isinstance(given, enum.Enum) else str(given)
        for label, choice in choices.items():
            if given is choice or wanted in (label, getattr(choice, "value", choice)):
                return choice
        raise self.refuse(
            f"{parameter}={wanted!r}",
            f"is not a value of {column.name}: {nearest(wanted, choices)}",
        )

    def seconds(self, parameter: str, given: Any, *, zero: bool) -> float:
        value = given.total_seconds() if isinstance(given, timedelta) else given
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{parameter}={given!r}", "must be a timedelta or seconds")
        if not (0 <= value < float("inf")) or (value == 0 and not zero):
            rule = "must not be negative" if zero else "must be more than 0 seconds"
            raise self.refuse(f"{parameter}={given!r}", rule)
        return float(value)

    def whole(self, parameter: str, given: Any) -> int:
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise self.refuse(f"{parameter}={given!r}", "must be a whole number, 0 or more")
        return given

    def reapable(self, given: Any) -> bool | Column[Any] | Callable[[Any], Any]:
        if isinstance(given, bool):
            return given
        if isinstance(given, str) or hasattr(given, "key"):
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
        if not all(isinstance(table, Table) for table in self.mapper.tables):
            raise self.refuse("the model", "is mapped to a query; only tables can be recovered")

    def _check_key(self) -> None:
        for column in self.mapper.primary_key:
            if not is_supported(column):
                raise self.refuse(
                    f"the primary key {column.name!r}",
                    f"is of type {column.type}; integers, UUIDs and strings can be recovered",
                )

    def _infer_value(self, column: Column[Any], parameter: str) -> Any:
        if not isinstance(column.type, Enum):
            return None
        choices = {label.casefold(): choice for label, choice in _choices(column.type).items()}
        found = (choices.get(name) for name in STATUS_NAMES[parameter])
        return next((choice for choice in found if choice is not None), None)

    @property
    def _names(self) -> list[str]:
        return list(self.mapper.columns.keys())

    @property
    def _listing(self) -> str:
        return ", ".join(self._names)


def _choices(kind: Enum) -> dict[str, Any]:
    if kind.enum_class is not None:
        return dict(kind.enum_class.__members__)
    return {label: label for label in kind.enums}


def _labels(column: Column[Any]) -> list[str]:
    return list(_choices(column.type)) if isinstance(column.type, Enum) else []


def _is_time(column: Column[Any]) -> bool:
    return isinstance(stored_type(column.type), DateTime)
