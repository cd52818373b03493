"""Why this plan, why not another; the plan as written."""
