"""The c10d backend ``xmesh``: registration, and the inner backends that carry each device kind."""


def register() -> None:
    """Registers ``xmesh`` with torch.distributed for cpu and cuda tensors. Safe to call again."""
