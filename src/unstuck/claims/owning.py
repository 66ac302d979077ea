"""What the owner of a claim may do with it: start, beat, checkpoint, end. Each is fenced by the
token, for the record may be somebody else's by now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import ColumnElement, Select, and_, delete, func, null, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncConnection

from unstuck import tables
from unstuck.claims.finding import Finder, hung_claims, stale_claims
from unstuck.clock import now, older_than, seconds_since
from unstuck.tables import claims

# A statement takes no more than 32,767 parameters, and each claim is two of them.
MOST_CLAIMS = 10_000


class Owned(Protocol):
    """What identifies a claim."""

    @property
    def workflow(self) -> str: ...
    @property
    def record_id(self) -> str: ...
    @property
    def token(self) -> UUID: ...


def is_owned(claim: Owned) -> ColumnElement[bool]:
    return and_(
        claims.c.workflow == claim.workflow,
        claims.c.record_id == claim.record_id,
        claims.c.token == claim.token,
    )


def guard(claim: Owned) -> Select[Any]:
    """One row while the claim is owned, locked so that it stays so until the transaction ends."""
    return select(claims.c.token).where(is_owned(claim)).with_for_update()


async def start_claim(connection: AsyncConnection, claim: Owned) -> bool:
    """From here on the host's code has run; False if the claim is lost."""
    return await _change(connection, claim, started_at=now(), heartbeat_at=now())


async def save_checkpoint(
    connection: AsyncConnection, claim: Owned, details: Any, step: str | None
) -> bool:
    written = {"details": details} if step is None else {"details": details, "step": step}
    return await _change(connection, claim, heartbeat_at=now(), **written)


async def mark_effect(connection: AsyncConnection, claim: Owned, effect: str | None) -> bool:
    marked = null() if effect is None else effect
    return await _change(connection, claim, heartbeat_at=now(), effect=marked)


async def drop_claim(connection: AsyncConnection, claim: Owned) -> bool:
    """False if the claim is lost, and then nothing that this transaction wrote may be committed."""
    return claim.token in await drop_claims(connection, [claim])


async def drop_claims(connection: AsyncConnection, owned: Sequence[Owned]) -> set[UUID]:
    """The tokens of those that were still owned."""
    gone = delete(claims).where(_are(owned)).returning(claims.c.token)
    return set(await connection.scalars(gone))


async def take_claim(
    connection: AsyncConnection, claim: Owned, worker_id: str, threshold: float, **values: Any
) -> bool:
    """A claim for a record that its worker has taken up by itself; False if another worker has one
    and lives."""
    fresh = {
        "token": claim.token,
        "worker_id": worker_id,
        "claimed_at": now(),
        "started_at": now(),
        "heartbeat_at": now(),
        "effect": null(),
        "hung_at": null(),
        **values,
    }
    new = tables.UPSERT[connection.dialect.name](claims).values(
        workflow=claim.workflow, record_id=claim.record_id, **fresh
    )
    last = func.coalesce(claims.c.heartbeat_at, claims.c.started_at, claims.c.claimed_at)
    taken = new.on_conflict_do_update(
        index_elements=[claims.c.workflow, claims.c.record_id],
        set_=fresh,
        where=older_than(last, threshold),
    )
    rows = await connection.execute(taken.returning(claims.c.token))
    return rows.one_or_none() is not None


async def beat(connection: AsyncConnection, owned: Sequence[Owned]) -> set[UUID]:
    """Beats for all claims of a process in one statement; the tokens of those that are still there.

    A claim that is locked is not waited for: whoever locks it is its own worker, at its end."""
    if len(owned) > MOST_CLAIMS:
        rest = await beat(connection, owned[MOST_CLAIMS:])
        return rest | await beat(connection, owned[:MOST_CLAIMS])
    mine = _are(owned)
    change = update(claims).values(heartbeat_at=now())
    if connection.dialect.name == "postgresql":
        free = (
            select(claims.c.workflow, claims.c.record_id)
            .where(mine)
            .with_for_update(skip_locked=True, key_share=True)
            .cte("free")
        )
        same = claims.c.workflow == free.c.workflow, claims.c.record_id == free.c.record_id
        change = change.where(*same)
    else:
        change = change.where(mine)
    beaten = set(await connection.scalars(change.returning(claims.c.token)))
    missed = [claim for claim in owned if claim.token not in beaten]
    return beaten | await see(connection, missed) if missed else beaten


async def see(connection: AsyncConnection, owned: Sequence[Owned]) -> set[UUID]:
    """The tokens of those that are still there."""
    found = select(claims.c.record_id, claims.c.token).where(_are(owned[:MOST_CLAIMS]))
    return {row.token for row in await connection.execute(found)}


async def mark_hung(connection: AsyncConnection, finder: Finder) -> list[Any]:
    """The claims that are found to be hung now, each once: record_id, worker_id, seconds."""
    marked = (
        update(claims)
        .where(*_free(finder, *hung_claims(finder)))
        .values(hung_at=now())
        .returning(
            claims.c.record_id,
            claims.c.worker_id,
            seconds_since(claims.c.started_at).label("seconds"),
        )
    )
    return list(await connection.execute(marked))


async def list_stale(connection: AsyncConnection, finder: Finder, limit: int) -> dict[str, UUID]:
    """The tokens of claims whose workers are gone, by record."""
    query = select(claims.c.record_id, claims.c.token).where(*stale_claims(finder)).limit(limit)
    return {row.record_id: row.token for row in await connection.execute(query)}


async def drop_stale(connection: AsyncConnection, finder: Finder, tokens: Iterable[UUID]) -> None:
    orphans = (*stale_claims(finder), claims.c.token.in_(list(tokens)))
    await connection.execute(delete(claims).where(*_free(finder, *orphans)))


async def lock_left_over(
    connection: AsyncConnection, workflow: str, record_ids: Sequence[str]
) -> set[str]:
    """Those of these records whose claims nobody has locked."""
    found = await connection.scalars(
        select(claims.c.record_id)
        .where(claims.c.workflow == workflow, claims.c.record_id.in_(record_ids))
        .with_for_update(skip_locked=True)
    )
    return set(found)


def _free(finder: Finder, *wanted: ColumnElement[bool]) -> list[ColumnElement[bool]]:
    """A claim that is locked is passed over: its worker lives, and nobody waits for it."""
    if finder.dialect != "postgresql":
        return list(wanted)
    free = select(claims.c.token).where(*wanted).with_for_update(skip_locked=True)
    mine = claims.c.workflow == finder.workflow.name
    return [mine, claims.c.token.in_(free.cte("free").select())]


async def _change(connection: AsyncConnection, claim: Owned, **values: Any) -> bool:
    changed: CursorResult[Any] = await connection.execute(
        update(claims).where(is_owned(claim)).values(**values)
    )
    return changed.rowcount == 1


def _are(owned: Sequence[Owned]) -> ColumnElement[bool]:
    """The token alone would do; the rest is for the index."""
    return and_(
        claims.c.workflow.in_({claim.workflow for claim in owned}),
        claims.c.record_id.in_([claim.record_id for claim in owned]),
        claims.c.token.in_([claim.token for claim in owned]),
    )
