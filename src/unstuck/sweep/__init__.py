"""The sweep: finds what is stuck, workflow by workflow, and brings it back."""

from unstuck.sweep.sweeper import Sweeper

__all__ = ["Sweeper"]
