"""What the commands of ``xmesh`` do: each module has a ``run(options)``. Their arguments are read in ``xmesh_cli``."""
