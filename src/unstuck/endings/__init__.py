"""How a claim of the job loop ends, and what is done where that cannot be written."""

from unstuck.endings.keeping import Endings
from unstuck.endings.writing import COMPLETED, FAILED, RETURNED, STOPPED, Ending, write_ending

__all__ = ["COMPLETED", "FAILED", "RETURNED", "STOPPED", "Ending", "Endings", "write_ending"]
