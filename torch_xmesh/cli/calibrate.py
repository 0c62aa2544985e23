"""``xmesh calibrate``: measures the links of the group that torchrun has started, and writes a topology file."""

import argparse
import os

from torch_xmesh.calibration import run as measure


def run(options: argparse.Namespace) -> None:
    """Raises ValueError where no group was started."""
    if "RANK" not in os.environ:
        raise ValueError(
            "calibrate measures a running group: torchrun --nproc-per-node N -m xmesh_cli calibrate --out FILE"
        )
    measure(options.out, options.num_bytes)
