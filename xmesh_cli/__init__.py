"""The command line ``xmesh``. It stands beside torch_xmesh, so that arguments are read before torch is imported."""
