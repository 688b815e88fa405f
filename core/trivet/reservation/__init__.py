"""The memory ledger: every byte that is held, counted once."""

from trivet.reservation.activations import activation_bytes
from trivet.reservation.cuda import GRAPHS_DRIVER_LINE, GRAPHS_LINE, cuda_lines
from trivet.reservation.ledger import KV_LINE, LedgerLine, MemoryLedger, reserve, size_text

__all__ = [
    "GRAPHS_DRIVER_LINE",
    "GRAPHS_LINE",
    "KV_LINE",
    "LedgerLine",
    "MemoryLedger",
    "activation_bytes",
    "cuda_lines",
    "reserve",
    "size_text",
]
