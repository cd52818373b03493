"""What one block of a model costs on the devices of its ranks."""
