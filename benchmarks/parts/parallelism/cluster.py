"""The cluster of Alpa's evaluation: Amazon's p3.16xlarge, 8 V100 of 16 GB on NVLink, and 25 Gbit/s between hosts.

What devices and links are taken to reach of their peaks is assumed, not measured: these are the only free numbers.
"""

import torch

import torch_xmesh as xm

GIB = 1 << 30
DEVICES_PER_HOST = 8
MEMORY_BYTES = 16 * GIB
PEAK_HALF_FLOPS = 125e12
PEAK_SINGLE_FLOPS = 15.7e12
PEAK_BYTES_PER_S = 900e9
REACHED_HALF = 0.5
"""The fraction of the peak that large matrix products in half precision reach."""
REACHED_SINGLE = 0.8
"""The same in single precision."""
REACHED_BYTES = 0.8
NVLINK_BYTES_PER_S = 120_000_000_000
"""What a device carries each way of its six links' 150 GB/s."""
NIC_BYTES_PER_S = 25_000_000_000 // 8


def half_precision() -> xm.Compute:
    return xm.Compute(flops=PEAK_HALF_FLOPS * REACHED_HALF, bytes_per_s=PEAK_BYTES_PER_S * REACHED_BYTES)


def single_precision() -> xm.Compute:
    return xm.Compute(flops=PEAK_SINGLE_FLOPS * REACHED_SINGLE, bytes_per_s=PEAK_BYTES_PER_S * REACHED_BYTES)


def network(devices_per_host: int = DEVICES_PER_HOST) -> xm.Topology:
    return xm.Topology(
        devices_per_host=devices_per_host, nic_bytes_per_s=NIC_BYTES_PER_S, local_bytes_per_s=NVLINK_BYTES_PER_S
    )


def devices_of(num_hosts: int, devices_per_host: int) -> xm.Mesh:
    """Rows are hosts."""
    return xm.Mesh(torch.arange(num_hosts * devices_per_host).reshape(num_hosts, devices_per_host))


def assumptions() -> list[str]:
    """For the head of a table."""
    return [
        f"assumed of a device: {REACHED_HALF:g} of {PEAK_HALF_FLOPS / 1e12:g} TFLOP/s in half precision, "
        f"{REACHED_SINGLE:g} of {PEAK_SINGLE_FLOPS / 1e12:g} in single, {REACHED_BYTES:g} of "
        f"{PEAK_BYTES_PER_S / 1e9:g} GB/s, {MEMORY_BYTES / GIB:g} GiB",
        f"assumed of links: {NVLINK_BYTES_PER_S / 1e9:g} GB/s in a host, {NIC_BYTES_PER_S / 1e9:g} between hosts",
    ]
