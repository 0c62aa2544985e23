"""What is installed here and what it found."""

from dataclasses import dataclass, fields

import torch

from torch_xmesh import _C


@dataclass(frozen=True)
class About:
    """What :func:`about` found; ``print`` shows a line for each.

    Attributes:
        version: torch_xmesh's version.
        torch_version: the version of the installed torch.
        cuda_kernels: what packs, unpacks and adds on CUDA devices: torch_xmesh's kernels, or torch's operators and why.
        device_communicators: how many communicators reshards on devices have made and keep in this process, and how
            much device memory went while they were made, in MiB.
    """

    version: str
    torch_version: str
    cuda_kernels: str
    device_communicators: str

    def __str__(self) -> str:
        names = {field.name: field.name.replace("_", " ") for field in fields(self)}
        width = max(map(len, names.values()))
        return "\n".join(f"{said:{width}}  {getattr(self, name)}" for name, said in names.items())


def about() -> About:
    """What is installed here, to be pasted into a bug report. Needs no process group and touches no device."""
    from torch_xmesh import __version__

    return About(__version__, torch.__version__, _cuda_kernels(), _device_communicators())


def _device_communicators() -> str:
    number, num_bytes = _C.device_communicators()
    memory = f", which took {num_bytes / 2**20:.0f} MiB" if num_bytes > 0 else ""
    return f"{number}{memory}"


def _cuda_kernels() -> str:
    architectures, obstacle = _C.cuda_kernels()
    if architectures is None:
        return f"torch operators: {obstacle}"
    return f"own CUDA kernels for {architectures}" + (
        "" if obstacle is None else f", which cannot run here: {obstacle}"
    )
