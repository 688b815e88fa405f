"""The CUDA attention backend over FlashInfer's compiled kernels: predicates and sizes are free of torch and of it."""
