"""``python -m xmesh_cli``: as ``xmesh``; under torchrun ``torchrun ... -m xmesh_cli``."""

import sys

from xmesh_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
