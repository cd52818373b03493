"""Pictures of a plan: one HTML file, a trace for Perfetto, JSON, two plans side by side. All read the plan alone."""
