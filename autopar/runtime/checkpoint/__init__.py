"""Checkpoints: written under one plan, read under any other, and verified while they are read; see docs/adr/0025-checkpoints.md."""
