"""What ``par(**batch)`` and ``par.predict(batch)`` return: the model's own outputs, put together from the ranks' parts."""
