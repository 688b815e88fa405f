"""From a checkpoint's files, or from a seed, to the parameters of a model."""
