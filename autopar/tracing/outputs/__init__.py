"""What a traced model returns besides its loss."""
