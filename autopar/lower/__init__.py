"""From a plan and a graph to one rank's program, and the check of its types before it runs."""
