"""The search: exact inside (layouts of a block, stage cut), Optuna or branch and bound outside."""
