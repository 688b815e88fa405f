"""Admission and scheduling: counts only, the engine carries the plans out."""

from trivet.scheduler.admission import AdmissionGate
from trivet.scheduler.bounds import check_grid, drain_bound_steps, progress_bound_steps
from trivet.scheduler.plan import Ending, Row, SavePoint, StepPlan
from trivet.scheduler.request import Request, Status
from trivet.scheduler.scheduler import Scheduler

__all__ = [
    "AdmissionGate",
    "Ending",
    "Request",
    "Row",
    "SavePoint",
    "Scheduler",
    "Status",
    "StepPlan",
    "check_grid",
    "drain_bound_steps",
    "progress_bound_steps",
]
