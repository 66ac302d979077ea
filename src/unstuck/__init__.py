"""Brings back the records that are stuck in Processing, in the tables that you already have."""

from unstuck.app import Unstuck
from unstuck.defaults import (
    cleanup_zombie_records,
    configure,
    heartbeat,
    run_job_loop,
    setup_zombie_cleanup_scheduler,
)
from unstuck.errors import ClaimLost, RegistrationError, UnstuckError
from unstuck.events import Observer
from unstuck.loop import Claim
from unstuck.recovery import Compensate
from unstuck.registry import Registry, recoverable, registry
from unstuck.settings import ZombieSettings
from unstuck.tables import metadata

__all__ = [
    "Claim",
    "ClaimLost",
    "Compensate",
    "Observer",
    "RegistrationError",
    "Registry",
    "Unstuck",
    "UnstuckError",
    "ZombieSettings",
    "cleanup_zombie_records",
    "configure",
    "heartbeat",
    "metadata",
    "recoverable",
    "registry",
    "run_job_loop",
    "setup_zombie_cleanup_scheduler",
]
