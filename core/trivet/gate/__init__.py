"""The golden gate: the runtime held against transformers on the same tensors, and against faults put in on purpose."""
