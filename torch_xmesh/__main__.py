"""``python -m torch_xmesh``: the command line."""

import sys

from torch_xmesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
