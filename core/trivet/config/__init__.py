"""What a checkpoint's config.json says, read once into typed values. Free of torch."""
