"""What one training step costs: stages simulated, communication of data ranks, memory."""
