"""An emulated cluster on one Linux machine: hosts are network namespaces, NICs are shaped, devices are processes.

    python -m torch_xmesh.testing.cluster --hosts 5 --devices 4 --rate 200mbit -- script.py args

or `EmulatedCluster` as a context manager. Nothing here needs torch.
"""

from .emulated import EmulatedCluster, NotShapedError
from .goodput import Goodput
from .job import Job, RankHandle
from .network import NetworkError, parse_rate, sweep, unavailable_reason

__all__ = [
    "EmulatedCluster",
    "Goodput",
    "Job",
    "NetworkError",
    "NotShapedError",
    "RankHandle",
    "parse_rate",
    "sweep",
    "unavailable_reason",
]
