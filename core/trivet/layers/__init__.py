"""Layers that families share, built from parameters and called with a step. The modules import torch."""
