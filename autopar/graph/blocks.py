"""Blocks (stub)."""
from autopar.graph.ir import Block, digest
def find_blocks(ops, specs, parameters):
    return (Block(index=0,start=0,stop=len(ops),hash=digest("x"),label=""),)
