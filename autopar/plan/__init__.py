"""The plan of a training run as plain data: mesh, types, schedule and predictions; its file, checks and text; and the log of a run."""
