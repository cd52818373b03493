"""Models from their descriptions: the model, example batches, and the graph that plans are made for."""
