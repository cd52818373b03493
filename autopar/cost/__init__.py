"""What a plan costs: time of operators, collectives and the pipeline; memory of each rank. Formulas alone:
every constant comes from a profile.
"""
