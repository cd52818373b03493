"""Questions to the planner other than the fastest plan: the smallest cluster, sweeps, fronts of several objectives, published layouts."""
