"""One training step on one rank: stages, gradients, the loss and its scale, what is kept for backward."""
