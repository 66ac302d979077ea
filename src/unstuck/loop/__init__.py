"""The job loop: claims records, works on them behind a fence, and ends every claim it took."""

from unstuck.loop.arguments import Filters, find_workflow
from unstuck.loop.claim import Claim
from unstuck.loop.heartbeat import Beating
from unstuck.loop.job_loop import JobLoop
from unstuck.loop.loops import Loops
from unstuck.loop.result import LoopResult
from unstuck.loop.workshop import Hearts, Workshop

__all__ = [
    "Beating",
    "Claim",
    "Filters",
    "Hearts",
    "JobLoop",
    "LoopResult",
    "Loops",
    "Workshop",
    "find_workflow",
]
