"""The running wing: executes one rank's program under torchrun. See docs/tour.md."""
