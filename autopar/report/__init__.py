"""Reports: a plan as an HTML page and as a trace for Perfetto, and plans, comparisons, runs and traced models as text and JSON values."""
