"""What one block of one rank's graph costs for one micro-batch: :class:`~autopar.cost.blocks.block_cost.BlockCost`.

``block_work.block_work`` counts what it does before any profile prices it, ``price_block`` prices that on a device and its
links. ``activation_lifetimes`` follows each storage from the operator that makes it to the last that needs it: what is kept from
forward to backward, the peaks in between, and what selective recompute makes again (Korthikanti et al. 2022, arXiv 2205.05198).
``block_cost`` has the collectives too that changes of layout are.
"""
