"""Benchmarks of the runtime: what ``trivet bench`` runs. Each keeps every raw sample in a record.

The modules import torch only where they run something.
"""
