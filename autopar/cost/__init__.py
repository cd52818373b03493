"""What a plan costs: time of operators, collectives and the pipeline, memory of each rank; constants come from profiles."""
