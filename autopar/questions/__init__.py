"""Other questions to the planner: smallest cluster, sweeps, fronts of several objectives, published layouts."""
