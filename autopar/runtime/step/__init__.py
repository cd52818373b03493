"""One training step on one rank: stages, gradients, the global loss and its scale, and activations kept for backward."""
