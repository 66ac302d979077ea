"""Sessions, engines and transactions: the way to the host's database, and what to do without it."""

from unstuck.db.breaker import Breaker, State
from unstuck.db.fence import Fence
from unstuck.db.lifeline import Lifeline
from unstuck.db.retrying import is_deadlock, is_locked, is_passing, retrying
from unstuck.db.sources import Sessions, SessionSource, engine_of
from unstuck.db.spool import Entry, Spool, make_spool
from unstuck.db.transaction import (
    Transaction,
    create_tables,
    tables_are_missing,
    transaction,
    use_time_zone,
)

__all__ = [
    "Breaker",
    "Entry",
    "Fence",
    "Lifeline",
    "SessionSource",
    "Sessions",
    "Spool",
    "State",
    "Transaction",
    "create_tables",
    "engine_of",
    "is_deadlock",
    "is_locked",
    "is_passing",
    "make_spool",
    "retrying",
    "tables_are_missing",
    "transaction",
    "use_time_zone",
]
