"""Values of parameters: from the model, from files, from checkpoints under any plan."""
