#!/bin/sh
# Trains on several nodes by torchrun. The same command on every node, at about the same time:
#   HEAD=node0 NODES=4 GPUS=8 sh examples/multi_node.sh examples/train_gpt2.py --plan plan.json
# HEAD is the node where all meet, reached from the others under this name. A rank that fails ends its round, and torchrun starts
# all of them again, up to RESTARTS times: the script goes on from its checkpoint, in a folder that all nodes see.
set -eu
: "${HEAD:?the node where all meet}" "${NODES:?how many nodes}"
exec torchrun \
    --nnodes "$NODES" --nproc-per-node "${GPUS:-8}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${JOB:-autopar}" \
    "$@"
