"""From the text that names a model to the model, its batches, and the graph that plans are for."""
