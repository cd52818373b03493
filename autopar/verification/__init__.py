"""A plan against one device: losses, gradients and parameters compared, and where they first differ."""
