"""Sessions, engines and transactions: the way to the host's database."""

from unstuck.db.sources import Sessions, SessionSource
from unstuck.db.transaction import Transaction, create_tables, tables_are_missing, transaction

__all__ = [
    "SessionSource",
    "Sessions",
    "Transaction",
    "create_tables",
    "tables_are_missing",
    "transaction",
]
