"""The command line: ``trivet``, or ``python -m trivet``."""

from trivet.cli.main import main

__all__ = ["main"]
