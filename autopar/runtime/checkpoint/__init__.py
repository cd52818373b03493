"""Checkpoints: written under one plan, read under any other, verified as they are read; see docs/adr/0025-checkpoints.md."""
