"""Every error that Trivet raises on purpose. All derive from `TrivetError`.

A message says what was found, what was expected, where (file, tensor, dimension, plugin) and what to do.
"""


class TrivetError(Exception):
    """Base of all errors that Trivet raises on purpose."""


class ConfigError(TrivetError):
    """A config.json, a limit or an argument has a value that cannot be served."""


class CheckpointError(TrivetError):
    """A checkpoint's files do not hold what its config promises. Names the file or the tensor."""


class CapacityExceeded(TrivetError):
    """A request, step or size is larger than a capacity allows.

    Attributes:
        dimension: name of the capacity dimension, for example ``"pages"``.
        requested: what was asked for, in units of that dimension.
        bound: the most that the capacity allows.
    """

    def __init__(self, dimension: str, requested: int, bound: int, advice: str = "") -> None:
        self.dimension = dimension
        self.requested = requested
        self.bound = bound
        self.advice = advice
        super().__init__(
            f"capacity exceeded in {dimension!r}: requested {requested}, the bound is {bound}"
            + (f"; {advice}" if advice else "")
        )

    def __reduce__(self) -> tuple[type["CapacityExceeded"], tuple[str, int, int, str]]:
        return type(self), (self.dimension, self.requested, self.bound, self.advice)


class MemoryBudgetError(TrivetError):
    """The memory budget cannot hold what the limits ask for. The message carries the whole ledger."""


class RequestRejected(TrivetError):
    """A request that can never be served under these limits, or is malformed. Nothing was changed."""


class PluginError(TrivetError):
    """A plugin is missing, incompatible, or broke its side of a protocol. Names plugin and phase."""


class UnusableLogits(TrivetError):
    """A row's logits hold NaN or no finite value; its request ends with this, the others go on."""


class AccountingError(TrivetError, RuntimeError):
    """Pages, slots or steps were accounted wrongly: a fault in Trivet itself, never in a request."""


class StepFailed(TrivetError, RuntimeError):
    """The step that computed a request raised something that is no `TrivetError`: that is the ``__cause__``."""


class RuntimeDown(TrivetError):
    """The runtime was closed, or a fault left its device unusable. No further call will succeed."""
