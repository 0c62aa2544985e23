"""``python -m torch_xmesh``: the command line, which ``xmesh`` starts faster."""

import sys

from xmesh_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
