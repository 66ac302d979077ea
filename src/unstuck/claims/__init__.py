"""Every statement on the host's rows, and on the claims to them."""

from unstuck.claims.claiming import Claimed, Claimer
from unstuck.claims.finding import Finder, Reach, key_of
from unstuck.claims.moving import (
    Change,
    end_lease,
    lock_record,
    move_record,
    move_records,
    read_statuses,
    revoke_claim,
)
from unstuck.claims.owning import (
    Owned,
    beat,
    drop_claim,
    drop_claims,
    drop_stale,
    guard,
    list_stale,
    mark_effect,
    mark_hung,
    save_checkpoint,
    see,
    start_claim,
    take_claim,
)
from unstuck.claims.taking import Taker
from unstuck.claims.walking import can_walk

__all__ = [
    "Change",
    "Claimed",
    "Claimer",
    "Finder",
    "Owned",
    "Reach",
    "Taker",
    "beat",
    "can_walk",
    "drop_claim",
    "drop_claims",
    "drop_stale",
    "end_lease",
    "guard",
    "key_of",
    "list_stale",
    "lock_record",
    "mark_effect",
    "mark_hung",
    "move_record",
    "move_records",
    "read_statuses",
    "revoke_claim",
    "save_checkpoint",
    "see",
    "start_claim",
    "take_claim",
]
