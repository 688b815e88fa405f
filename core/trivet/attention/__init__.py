"""Attention as the runtime sees it: batches, decode paths and plan owners. Backends live in folders of their own."""

from trivet.attention.batch import StepBatch
from trivet.attention.protocol import DecodePath, PathRequest, PlanOwner, Replan, Verdict
from trivet.attention.select import Selection, candidates, select_path

__all__ = [
    "DecodePath",
    "PathRequest",
    "PlanOwner",
    "Replan",
    "Selection",
    "StepBatch",
    "Verdict",
    "candidates",
    "select_path",
]
