"""Which models are recovered, and how."""

from unstuck.registry.inference import Reader
from unstuck.registry.registry import Parameters, Registry, recoverable, registry
from unstuck.registry.workflow import Workflow

__all__ = ["Parameters", "Reader", "Registry", "Workflow", "recoverable", "registry"]
