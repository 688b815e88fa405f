"""What one step did."""

from attrs import frozen


@frozen
class StepReport:
    """A step as `Runtime.step` returns it and step observers see it.

    Attributes:
        prefill_tokens: prompt tokens computed.
        decode_tokens: decode rows computed, one token each.
        path: ``"decode"``, ``"prefill"``, ``"mixed"``, or ``"idle"`` when there was nothing to do.
        rows: rows of the step.
        new_tokens: tokens that requests were given.
        failed: requests that this step ended with an error.
        duration_ms: wall-clock time of the step.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    path: str = "idle"
    rows: int = 0
    new_tokens: int = 0
    failed: int = 0
    duration_ms: float = 0.0
