"""The commands and their arguments. ``module`` is where ``run(options)`` is; it is imported once they are read."""

from pathlib import Path
from typing import Any

from xmesh_cli import values


def add_plan(commands: Any) -> None:
    """``xmesh plan``."""
    parser = commands.add_parser("plan", help="plan a reshard and print it, without any process group")
    parser.set_defaults(module="torch_xmesh.cli.plan")
    parser.add_argument("--shape", help="global shape: 1024,1024,512 (empty for a scalar)")
    parser.add_argument("--dtype", default="float32", help="torch's name (default: %(default)s)")
    parser.add_argument("--src-mesh", help="rows x columns x ... @ first rank: 2x4, 3x4@8; or JSON: [[0,1],[2,3]]")
    parser.add_argument("--src", help='placements, one per axis: "Replicate(),Shard(1)"')
    parser.add_argument("--dst-mesh", help="as --src-mesh")
    parser.add_argument("--dst", help="as --src")
    parser.add_argument("--devices-per-host", type=int, help="consecutive ranks per host")
    parser.add_argument("--topology", type=Path, help="a topology file, instead of --devices-per-host")
    parser.add_argument("--strategy", default="auto", help="auto, send_recv, broadcast, broadcast:naive+naive, ...")
    parser.add_argument("--case-file", type=Path, help="JSON: a list of objects with name and the fields above")
    parser.add_argument("--compare", action="store_true", help="one line per strategy instead of one plan")
    parser.add_argument("--json", action="store_true", help="print the plan (or the list of plans) as JSON")
    parser.add_argument("--plot", type=Path, help="draw each host's send and receive lanes into this image")


def add_calibrate(commands: Any) -> None:
    """``xmesh calibrate``."""
    parser = commands.add_parser("calibrate", help="under torchrun: measure the links, write a topology file")
    parser.set_defaults(module="torch_xmesh.cli.calibrate")
    parser.add_argument("--out", default="topology.json", help="the file (default: %(default)s)")
    parser.add_argument(
        "--num-bytes",
        type=values.positive_bytes,
        default=32 << 20,
        help="of the transfer that measures a rate, inside a host 4 times as many (default: 32MiB)",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="kind of device, such as cuda, whose tensors move as between stages of a pipeline: through host memory "
        "(default: %(default)s)",
    )


def add_schedule(commands: Any) -> None:
    """``xmesh schedule``."""
    parser = commands.add_parser("schedule", help="choose a pipeline's schedule by simulation, without any ranks")
    parser.set_defaults(module="torch_xmesh.cli.schedule")
    parser.add_argument("--stages", type=int, required=True, help="number of stages")
    parser.add_argument("--microbatches", type=int, required=True, help="per step")
    parser.add_argument(
        "--forward-ms", type=values.milliseconds, required=True, help="F of one microbatch on one stage"
    )
    parser.add_argument("--input-ms", type=values.milliseconds, help="I, the input gradients (default: as F)")
    parser.add_argument("--weight-ms", type=values.milliseconds, help="W, the weight gradients (default: as F)")
    parser.add_argument(
        "--bytes", type=values.num_bytes, default=0, help="of a microbatch's values between stages: 64MiB"
    )
    parser.add_argument("--nic", type=values.bits_per_second, help="what a place's network interface carries: 25gbit")
    parser.add_argument("--latency-us", type=float, default=0.0, help="from the last byte sent until its use")
    parser.add_argument(
        "--activation-bytes", type=values.num_bytes, help="held per microbatch until I (default: --bytes)"
    )
    parser.add_argument("--weight-bytes", type=values.num_bytes, help="held between I and W (default: as until I)")
    parser.add_argument("--memory-limit", type=values.positive_bytes, help="of each place: 40GiB")
    parser.add_argument("--early-weights", action="store_true", help="W may run before their turn where a place waits")
    parser.add_argument("--places", help="the place of each stage: 0,1,2,2,1,0 (default: one stage each)")
    parser.add_argument("--plot", type=Path, help="draw the winner's simulated step into this image")
    parser.add_argument("--csv", type=Path, help="write the winner in torch's notation")


def add_parallelize(commands: Any) -> None:
    """``xmesh parallelize``."""
    parser = commands.add_parser("parallelize", help="plan how a model runs on a cluster, without any ranks")
    parser.set_defaults(module="torch_xmesh.cli.parallelize")
    parser.add_argument("model", help="file:function; the function returns (model, args) or (model, args, kwargs)")
    parser.add_argument("--mesh", required=True, help="hosts x devices of each: 2x4")
    parser.add_argument("--microbatches", type=values.count, default=8, help="of a step (default: %(default)s)")
    parser.add_argument("--memory-limit", type=values.positive_bytes, help="of a device: 40GiB")
    parser.add_argument("--flops", type=values.flops, help="operations per second of a device: 312TFLOPS")
    parser.add_argument("--bytes-per-s", type=values.bytes_per_second, help="what a device reads and writes: 2TB/s")
    parser.add_argument(
        "--times",
        type=Path,
        help="a file of what operators take; where there is none they are measured on this machine, and it is written",
    )
    parser.add_argument("--topology", type=Path, help="a topology file, for links")
    parser.add_argument("--schedule", default="auto", help="auto, duplex, or a name (default: %(default)s)")
    parser.add_argument(
        "--overlap",
        default="auto",
        choices=["auto", "yes", "no"],
        help="one microbatch computes while another communicates (default: %(default)s)",
    )
    parser.add_argument("--collectives", default="auto", help="cost model: auto, ring, gloo, alpa")
    parser.add_argument("--max-seconds", type=values.seconds, help="then the best so far is taken")
    parser.add_argument("--costs", action="store_true", help="tables of what collectives and operators cost")
    parser.add_argument("--compare", action="store_true", help="a table of the plan beside presets")
    parser.add_argument("--explain", metavar="NAME", help="alternatives of an operator or a module")
    parser.add_argument("--save", type=Path, help="write the plan as JSON")
    parser.add_argument("--plot", type=Path, help="draw the plan into this image")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--run",
        dest="is_training",
        action="store_true",
        help="train three steps on this machine's processes: predicted beside measured",
    )
