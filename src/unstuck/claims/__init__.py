"""Every statement on the host's rows, and on the claims to them."""

from unstuck.claims.finding import Finder, Reach, key_of
from unstuck.claims.moving import lock_record, move_record, read_statuses, revoke_claim
from unstuck.claims.taking import Taker
from unstuck.claims.walking import can_walk

__all__ = [
    "Finder",
    "Reach",
    "Taker",
    "can_walk",
    "key_of",
    "lock_record",
    "move_record",
    "read_statuses",
    "revoke_claim",
]
