"""Kernels of the programs whose published runs are predicted, where they are not those of torch's eager mode.

``fusion.py`` has :class:`~autopar.validate.kernels.fusion.ForeignKernels`, the hook that ``autopar.cost.blocks.block_work`` calls;
``megatron.py`` those of Megatron's layers of 2021 and 2022. autopar itself runs torch's operators, and its cost model knows no others.
"""
