"""What ``make gpu`` runs: ``python -m autopar.benchmark.gpu``."""
