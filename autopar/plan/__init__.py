"""The plan of a training run as plain data: mesh, types of tensors, schedule; its file format, checks and text; what a run measured of it."""
