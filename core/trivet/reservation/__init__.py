"""The memory ledger: every byte that is held, counted once."""

from trivet.reservation.activations import activation_bytes
from trivet.reservation.cuda import CONTEXT_LINE, GRAPHS_DRIVER_LINE, GRAPHS_LINE, cuda_lines
from trivet.reservation.ledger import KV_LINE, LedgerLine, MemoryLedger, check_kv_pages, reserve, size_text

__all__ = [
    "CONTEXT_LINE",
    "GRAPHS_DRIVER_LINE",
    "GRAPHS_LINE",
    "KV_LINE",
    "LedgerLine",
    "MemoryLedger",
    "activation_bytes",
    "check_kv_pages",
    "cuda_lines",
    "reserve",
    "size_text",
]
