"""The reference backend: paged attention in torch, on any device; the oracle of the others."""
