"""Lowers a plan and a traced graph to the program of one rank, and checks the program's types before it runs."""
