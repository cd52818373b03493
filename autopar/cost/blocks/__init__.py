"""What one block of one rank's graph costs for one micro-batch: :class:`~autopar.cost.blocks.block_cost.BlockCost`.

``block_work.block_work`` counts the work of a block independently of any profile; ``price_block`` prices it on a device and its links.
``activation_lifetimes`` follows each storage from the operator that makes it to the last one that needs it: it gives what is kept from
forward to backward, the peaks in between, and what selective recompute computes again (Korthikanti et al. 2022, arXiv 2205.05198).
``block_cost`` also has the collectives of operators.
"""
