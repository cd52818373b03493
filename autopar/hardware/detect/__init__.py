"""What this machine is: measured once and kept, known by its GPUs' names, or put together from what each rank says of its place."""
