"""Parallel models in the training loops of other libraries: accelerate, Hugging Face's Trainer, Lightning.

For each library all ranks of a parallel model are one device: every rank gets the same global batches and has the same loss.
"""
