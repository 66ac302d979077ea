"""unstuck's own three tables, with no foreign key into the host's.

The host's rows may be deleted, truncated or partitioned at will; what is left over here is pruned.
The heartbeat column carries no index, so that a beat is a HOT update.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    DateTime,
    Dialect,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    Uuid,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import JSONB

from unstuck.clock import now


class Moment(TypeDecorator[datetime]):
    """A point in time that is aware, and in UTC, on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or value.tzinfo is not None:
            return value
        return value.replace(tzinfo=UTC)


_Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_Id = BigInteger().with_variant(Integer(), "sqlite")

# INSERT with ON CONFLICT, which each dialect of SQLAlchemy has for itself.
UPSERT: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}

metadata = MetaData()

# Who owns a record right now. A claim lives from the claiming of a record to its end.
claims = Table(
    "zombie_claims",
    metadata,
    Column("workflow", String, primary_key=True),
    Column("record_id", String, primary_key=True),
    Column("token", Uuid, nullable=False),
    Column("worker_id", String, nullable=False),
    Column("claimed_at", Moment, nullable=False, server_default=now()),
    Column("started_at", Moment),
    Column("heartbeat_at", Moment),
    Column("step", String),
    Column("details", _Json),
    # A side effect that was begun and not seen to end: whoever dies in it is not run again.
    Column("effect", Text),
    Column("hung_at", Moment),
)

# What unstuck remembers of a record until it completes cleanly.
records = Table(
    "zombie_records",
    metadata,
    Column("workflow", String, primary_key=True),
    Column("record_id", String, primary_key=True),
    Column("zombie_count", Integer, nullable=False, server_default="0"),
    Column("last_zombie_at", Moment),
    Column("retry_at", Moment),
    # Set while a requeue waits for retry_at because the host's own loop would not.
    Column("deferred_at", Moment),
    Column("held_at", Moment),
    Column("held_reason", Text),
    Column("details", _Json),
)

# Everything that unstuck did, append-only. record_id is NULL for what concerns a whole workflow.
events = Table(
    "zombie_events",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("at", Moment, nullable=False, server_default=now()),
    Column("workflow", String, nullable=False),
    Column("record_id", String),
    Column("kind", String, nullable=False),
    Column("cause", String),
    Column("outcome", String),
    Column("worker_id", String),
    Column("zombie_count", Integer),
    Column("stale_seconds", Float),
    Column("data", _Json),
    Index("zombie_events_story", "workflow", "record_id", "id"),
    Index("zombie_events_at", "at"),
)
Index(
    "zombie_events_mass_stall",
    events.c.workflow,
    events.c.at,
    postgresql_where=events.c.kind == "mass_stall",
    sqlite_where=events.c.kind == "mass_stall",
)
