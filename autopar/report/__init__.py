"""Pictures of a plan: text for a terminal, one HTML file, a trace for Perfetto. All read the plan alone."""
