"""What is installed here and what it found."""

from dataclasses import dataclass, fields

import torch

from torch_xmesh import _C


@dataclass(frozen=True)
class About:
    """What :func:`about` found; ``print`` shows a line for each.

    Attributes:
        version: of torch_xmesh.
        torch_version: of the torch beside it.
        cuda_kernels: what packs, unpacks and adds on CUDA devices: own kernels, or torch's operators and why.
    """

    version: str
    torch_version: str
    cuda_kernels: str

    def __str__(self) -> str:
        names = {field.name: field.name.replace("_", " ") for field in fields(self)}
        width = max(map(len, names.values()))
        return "\n".join(f"{said:{width}}  {getattr(self, name)}" for name, said in names.items())


def about() -> About:
    """Says what is installed here, for a report of an error; it needs no process group and touches no device."""
    from torch_xmesh import __version__

    return About(__version__, torch.__version__, _cuda_kernels())


def _cuda_kernels() -> str:
    architectures, obstacle = _C.cuda_kernels()
    if architectures is None:
        return f"torch operators: {obstacle}"
    return f"own CUDA kernels for {architectures}" + (
        "" if obstacle is None else f", which cannot run here: {obstacle}"
    )
