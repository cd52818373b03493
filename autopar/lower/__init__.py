"""Lowers a plan and a traced graph to the program of one rank, and checks the types of the program before it runs."""
