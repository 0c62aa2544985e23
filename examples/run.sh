#!/bin/bash
# From a bare clone to sharded tensors that move between real processes: sets up Python and torch, builds, runs the quickstart on 8 local ranks, then
# trains a small GPT on two pipeline stages of different shape and draws its losses into losses.png and what ran when into timeline.png.
# Where transformers is installed, one of its models too.
#   XMESH_PYTHON=/path/python bash examples/run.sh      with an environment that has torch >= 2.11
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup_python plot
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 8 examples/quickstart.py "$@"
say "a GPT on two stages of different shape"
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 3 examples/train_gpt.py --losses losses.png --timeline timeline.png
if "$PYTHON" -c 'import transformers' 2>/dev/null; then
  say "a Llama of Hugging Face's transformers on two stages"
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 3 examples/train_hf.py --losses losses_hf.png
fi
