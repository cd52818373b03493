"""Parallel models in the training loops of other libraries: accelerate, Hugging Face's Trainer, Lightning.

To each of them the ranks of a parallel model are one device: all are given the same global batches, and all have the same loss.
"""
