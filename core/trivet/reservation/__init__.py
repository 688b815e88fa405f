"""The memory ledger: every byte that is held, counted once."""

from trivet.reservation.activations import activation_bytes
from trivet.reservation.ledger import KV_LINE, LedgerLine, MemoryLedger, reserve, size_text

__all__ = ["KV_LINE", "LedgerLine", "MemoryLedger", "activation_bytes", "reserve", "size_text"]
