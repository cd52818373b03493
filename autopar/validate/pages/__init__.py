"""The pages that ``autopar validate`` writes."""
