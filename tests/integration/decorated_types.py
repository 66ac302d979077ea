"""Types of columns as applications decorate them."""

from typing import Any
from uuid import UUID

from sqlalchemy import CHAR, Dialect, Integer, String
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeDecorator, TypeEngine

from tests.integration.models import State


class Guid(TypeDecorator[UUID]):
    """SQLAlchemy's own recipe: a UUID on PostgreSQL, text elsewhere."""

    impl = CHAR
    cache_ok = True

    def __init__(self, length: int = 36) -> None:
        super().__init__()
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        own = postgresql.UUID() if dialect.name == "postgresql" else CHAR(self.length)
        return dialect.type_descriptor(own)

    def process_bind_param(self, value: UUID | None, dialect: Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        return str(value) if self.length == 36 else value.hex

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        return value if value is None or isinstance(value, UUID) else UUID(value)


class Ticket(TypeDecorator[str]):
    """To the application a word, in the database a number."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> int | None:
        return None if value is None else int(value.removeprefix("T-"))

    def process_result_value(self, value: int | None, dialect: Dialect) -> str | None:
        return None if value is None else f"T-{value}"


class Letter(TypeDecorator[State]):
    """To the application a member, in the database its first letter."""

    impl = String(1)
    cache_ok = True

    def process_bind_param(self, value: State | None, dialect: Dialect) -> str | None:
        return None if value is None else value.name[0]

    def process_result_value(self, value: str | None, dialect: Dialect) -> State | None:
        return None if value is None else next(s for s in State if s.name[0] == value)
