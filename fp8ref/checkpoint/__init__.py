"""FP8 checkpoints: read, written, converted and inspected; docs/checkpoints.md says which.

Headers and configs are read with the standard library; tensors need the extra ``checkpoints``.
"""

from fp8ref.checkpoint.convert import convert_checkpoint
from fp8ref.checkpoint.findings import CheckpointError, CheckpointWarning, Finding
from fp8ref.checkpoint.inspection import Inspection, inspect_checkpoint
from fp8ref.checkpoint.load import load_checkpoint
from fp8ref.checkpoint.save import save_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Finding",
    "Inspection",
    "convert_checkpoint",
    "inspect_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
