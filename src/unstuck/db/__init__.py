"""Sessions, engines and transactions: the way to the host's database."""

from unstuck.db.sources import Sessions, SessionSource
from unstuck.db.transaction import Transaction, create_tables, transaction

__all__ = ["SessionSource", "Sessions", "Transaction", "create_tables", "transaction"]
