#!/bin/bash
# From a bare clone to sharded tensors that move between real processes: sets up Python and torch, builds, runs the quickstart on 8 local ranks.
#   XMESH_PYTHON=/path/python bash examples/run.sh      with an environment that has torch >= 2.11
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup_python plot
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${XMESH_RANKS:-8}" examples/quickstart.py "$@"
