"""Which models are recovered, and how."""

from unstuck.registry.registry import Parameters, Registry, recoverable, registry
from unstuck.registry.workflow import Workflow

__all__ = ["Parameters", "Registry", "Workflow", "recoverable", "registry"]
