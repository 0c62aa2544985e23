"""The emulated cluster: ranks start on their hosts, links can be cut and slowed, and nothing is left behind."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_xmesh.testing import cluster as cluster_module
from torch_xmesh.testing.cluster import EmulatedCluster, NetworkError, NotShapedError, network, parse_rate, sweep
from torch_xmesh.testing.cluster.goodput import nic_rates

REPOSITORY = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys
from pathlib import Path
print("rank", os.environ["RANK"], "host", os.environ["GROUP_RANK"], "local", os.environ["LOCAL_RANK"],
      os.environ["MASTER_ADDR"], os.readlink("/proc/self/ns/net"), flush=True)
sys.exit(int(dict(part.split("=") for part in sys.argv[1:]).get(os.environ["RANK"], 0)))
"""

# The first rank of host 0 sends each line it reads from a pipe to the first rank of host 1, which prints what arrives.
PING = """
import os, socket, sys
if os.environ["LOCAL_RANK"] != "0":
    sys.exit(0)
if os.environ["GROUP_RANK"] == "1":
    with socket.create_server((os.environ["OWN"], 4000)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        while data := connection.recv(100):
            print("got", data.decode(), flush=True)
else:
    control = open(os.environ["CONTROL"])
    connection = socket.create_connection((os.environ["OWN"], 4000))
    for line in control:
        connection.sendall(line.strip().encode())
        print("sent", line.strip(), flush=True)
"""

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4000), timeout=0.3)"


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    kept = {path.name for path in Path("/etc/netns").iterdir()} if Path("/etc/netns").is_dir() else set()
    return {line.split()[0] for line in listed.splitlines() if line} | kept


def own_namespaces(pid: int) -> set[str]:
    return {name for name in namespaces() if name.startswith(f"xmesh-{pid}-")}


@pytest.fixture(scope="module")
def shaped() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(hosts=2, devices=2, rate="100mbit", rate_of={1: "50mbit"}) as cluster:
        if not cluster.is_shaped:
            pytest.skip(f"runs on Linux as root, with iproute2 (network namespaces): {cluster.unshaped_reason}")
        yield cluster


def python_module_env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}


def test_rates_are_read_as_tc_reads_them() -> None:
    assert parse_rate("200mbit") == 200_000_000
    assert parse_rate("1Gbit") == 10**9
    assert parse_rate("2.5mbit") == 2_500_000
    for wrong in ("", "200", "0mbit", "-1mbit", "200MB"):
        with pytest.raises(ValueError, match="rate"):
            parse_rate(wrong)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts=0"):
        EmulatedCluster(hosts=0, devices=1)
    with pytest.raises(ValueError, match="host 2 is not one of the 2 hosts"):
        EmulatedCluster(hosts=2, devices=1, rate_of={2: "1gbit"})


def test_malformed_buffers_are_refused() -> None:
    for burst in ("", "0kb", "32 kb", "-1kb", "much"):
        with pytest.raises(ValueError, match="burst"):
            EmulatedCluster(hosts=1, devices=1, burst=burst)
    for sizes in ((4096, 16384), (0, 1, 2), (3, 2, 1)):
        with pytest.raises(ValueError, match="tcp_wmem"):
            EmulatedCluster(hosts=1, devices=1, tcp_wmem=sizes)


def test_buffers_are_as_asked_for(shaped: EmulatedCluster) -> None:
    with EmulatedCluster(hosts=2, devices=1, rate="100mbit", burst="32kb", tcp_wmem=(4096, 16384, 65536)) as cluster:
        show = "import subprocess; print(open('/proc/sys/net/ipv4/tcp_wmem').read().split(), flush=True); "
        show += "print('loopback', open('/sys/class/net/lo/mtu').read(), flush=True); "
        show += "print(subprocess.run(['tc', 'qdisc'], capture_output=True, text=True, check=True).stdout)"
        job = cluster.run("-c", show)
        assert job.exit_codes == [0, 0]
        for handle in job.ranks:
            assert "['4096', '16384', '65536']" in handle.output
            assert "burst 32Kb" in handle.output
            assert "loopback 4096" in handle.output


def test_ranks_see_torchruns_environment_and_their_own_host(shaped: EmulatedCluster) -> None:
    job = shaped.run("-c", SCRIPT)
    assert job.exit_codes == [0, 0, 0, 0]
    fields = [handle.output.split() for handle in job.ranks]
    assert [line[1] for line in fields] == ["0", "1", "2", "3"]
    assert [line[3] for line in fields] == ["0", "0", "1", "1"]
    assert [line[5] for line in fields] == ["0", "1", "0", "1"]
    assert {line[6] for line in fields} == {shaped.address(0)}
    inodes = [line[7] for line in fields]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]
    assert os.readlink("/proc/self/ns/net") not in inodes


def test_the_first_failure_is_the_jobs_exit_code(shaped: EmulatedCluster) -> None:
    job = shaped.run("-c", SCRIPT, "2=7")
    assert job.exit_code == 7
    assert job.failed_rank is not None
    assert job.failed_rank.rank == 2


def test_a_failing_rank_stops_the_others_unless_told_otherwise(shaped: EmulatedCluster) -> None:
    script = "import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit(3)\nsignal.pause()"
    job = shaped.run("-c", script)
    assert job.exit_codes == [128 + signal.SIGTERM, 3, 128 + signal.SIGTERM, 128 + signal.SIGTERM]
    survivors = shaped.start("-c", "import signal; print('up', flush=True); signal.pause()", stop_on_failure=False)
    for rank in range(4):
        survivors.wait_for_output("up", rank=rank)
    survivors.ranks[0].send_signal(signal.SIGKILL)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2, 3\] of 4 still run"):
        survivors.wait(timeout=0.5)
    survivors.stop()
    assert survivors.exit_code == 128 + signal.SIGKILL


def test_output_carries_the_rank(shaped: EmulatedCluster) -> None:
    output = io.StringIO()
    shaped._output = output
    try:
        shaped.run("-c", "import os; print('one\\ntwo ' + os.environ['RANK'], end='')")
    finally:
        shaped._output = None
    assert sorted(output.getvalue().splitlines()) == sorted(
        line for rank in range(4) for line in (f"[rank {rank}] one", f"[rank {rank}] two {rank}")
    )


def test_a_cut_link_delivers_after_restore(shaped: EmulatedCluster, tmp_path: Path) -> None:
    control = tmp_path / "control"
    os.mkfifo(control)
    job = shaped.start("-c", PING, env={"OWN": shaped.address(1), "CONTROL": str(control)})
    job.wait_for_output("listening", rank=2)
    with control.open("w", buffering=1) as lines:
        lines.write("first\n")
        job.wait_for_output("got first", rank=2)
        shaped.cut(1)
        lines.write("second\n")
        job.wait_for_output("sent second", rank=0)
        assert shaped._network is not None
        connect = shaped._network.command_on(0, [sys.executable, "-c", CONNECT, shaped.address(1)])
        refused = subprocess.run(connect, capture_output=True, text=True, check=False)
        assert "TimeoutError" in refused.stderr
        assert "got second" not in job.ranks[2].output
        shaped.restore(1)
        job.wait_for_output("got second", rank=2)
    assert job.wait(timeout=30) == [0, 0, 0, 0]


def test_a_disturbed_pair_does_not_lower_what_a_nic_carries() -> None:
    pairs = {(0, 1): 11.9e6, (1, 0): 5e6, (1, 2): 20e6, (2, 1): 11e6, (0, 2): 11e6, (2, 0): 11e6}
    assert nic_rates(pairs, [100_000_000, 200_000_000, 200_000_000], 3) == pytest.approx([11.9e6, 23.8e6, 23.8e6])


def test_goodput_follows_the_shaped_rates(shaped: EmulatedCluster) -> None:
    goodput = shaped.goodput(seconds=0.5)
    assert set(goodput.pairs) == {(0, 1), (1, 0)}
    assert all(rate > 0 for rate in goodput.pairs.values())
    assert goodput.nic_bytes_per_s[0] == pytest.approx(2 * goodput.nic_bytes_per_s[1])


def test_wrong_hosts_and_factors_are_refused(shaped: EmulatedCluster) -> None:
    with pytest.raises(ValueError, match="host 2 is not one of the 2 hosts"):
        shaped.cut(2)
    with pytest.raises(ValueError, match="factor must be positive"):
        shaped.slow(0, 0)
    shaped.slow(0, 10)
    shaped.restore(0)


def test_sweep_removes_what_a_dead_run_left_and_spares_live_ones(shaped: EmulatedCluster) -> None:
    build = (
        "import os, sys\nfrom torch_xmesh.testing.cluster import EmulatedCluster\n"
        "cluster = EmulatedCluster(hosts=2, devices=1)\ncluster.start('-c', 'import signal; signal.pause()')\n"
        "print(os.getpid(), flush=True)\nsys.stdin.read()"
    )
    crashed = subprocess.Popen(
        [sys.executable, "-c", build], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=python_module_env()
    )
    with crashed:
        assert crashed.stdout is not None
        pid = int(crashed.stdout.readline())
        mine = own_namespaces(os.getpid())
        theirs = own_namespaces(pid)
        assert len(theirs) == 3
        sweep()
        assert own_namespaces(pid) == theirs
        crashed.kill()
        crashed.wait()
        removed = sweep()
    assert theirs <= set(removed)
    assert own_namespaces(pid) == set()
    assert own_namespaces(os.getpid()) == mine != set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_removes_everything(shaped: EmulatedCluster, number: signal.Signals, code: int) -> None:
    command = "-m torch_xmesh.testing.cluster --hosts 2 --devices 1 --no-goodput -- -c".split()
    driver = subprocess.Popen(
        [sys.executable, *command, "import signal; print('up', flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
        text=True,
        env=python_module_env(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    with driver:
        assert driver.stdout is not None
        while "up" not in driver.stdout.readline():
            pass
        assert len(own_namespaces(driver.pid)) == 3
        driver.send_signal(number)
        assert driver.wait(timeout=30) == code
    assert own_namespaces(driver.pid) == set()


def test_a_reader_that_has_had_enough_ends_the_ranks(shaped: EmulatedCluster) -> None:
    """`... | head`: ranks that would run on end, nothing is left, and nothing is complained of."""
    command = "-m torch_xmesh.testing.cluster --hosts 2 --devices 1 --no-goodput -- -c".split()
    driver = subprocess.Popen(
        [sys.executable, *command, "while True: print('more' * 100, flush=True)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=python_module_env(),
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        try:
            while "more" not in driver.stdout.readline():
                pass
            driver.stdout.close()
            code = driver.wait(timeout=60)
        finally:
            driver.kill()
        assert (code, driver.stderr.read()) == (141, "")
    assert own_namespaces(driver.pid) == set()


def test_an_output_that_fails_is_told() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("disk full")

    with EmulatedCluster(hosts=1, devices=2, rate=None, output=Full()) as cluster:
        job = cluster.start("-c", "import signal; print('up', flush=True); signal.pause()")
        with pytest.raises(OSError, match="disk full"):
            job.wait(60)
        assert None not in job.exit_codes


def test_the_command_line_passes_on_what_the_ranks_say_and_how_the_first_one_failed(
    shaped: EmulatedCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = (
        "import os, signal, sys\nprint('up', flush=True)\n"
        "if os.environ['RANK'] == '0': open(sys.argv[1], 'w').close(); signal.pause()\n"
        "open(sys.argv[1]).read(); print('no', 'more', end=''); sys.exit(7)"
    )
    command = "-m torch_xmesh.testing.cluster --hosts 2 --devices 1 --rate 100mbit -- -c".split()
    done = subprocess.run(
        [sys.executable, *command, script, str(gate)],
        capture_output=True,
        text=True,
        check=False,
        env=python_module_env(),
    )
    assert done.returncode == 7, done.stderr
    head, goodput, *said = done.stdout.splitlines()
    assert head.startswith("# 2 hosts x 1 devices, NICs shaped to 100mbit each way")
    rate = re.fullmatch(
        r"# goodput: (\S+) Mbit/s \(\S+ MB/s\), the most of 2 one-stream pairs \(median \S+, least \S+\)", goodput
    )
    assert rate, goodput
    assert float(rate[1]) > 0
    assert sorted(said) == ["[rank 0] up", "[rank 1] no more", "[rank 1] up"]
    assert done.stderr == "# rank 1 on host 1 failed first, with exit code 7\n"


def test_without_rights_it_runs_on_localhost_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.emulated, "unavailable_reason", lambda: "needs root")
    with EmulatedCluster(hosts=2, devices=1) as cluster:
        assert not cluster.is_shaped
        assert "NOTHING IS SHAPED" in cluster.description
        assert "needs root" in cluster.description
        job = cluster.run("-c", SCRIPT)
        assert job.exit_codes == [0, 0]
        assert "127.0.0.1" in job.ranks[0].output
        assert cluster.run("-c", SCRIPT, "1=5").exit_code == 5
        with pytest.raises(NotShapedError, match="host 0"):
            cluster.cut(0)


def test_a_failing_command_leaves_no_network(monkeypatch: pytest.MonkeyPatch, shaped: EmulatedCluster) -> None:
    before = namespaces()

    def fail(self: network.Network, host: int, bits_per_s: int) -> None:
        raise NetworkError("tc said no")

    monkeypatch.setattr(network.Network, "_shape", fail)
    with EmulatedCluster(hosts=2, devices=1) as cluster:
        assert cluster.unshaped_reason == "tc said no"
    assert namespaces() == before
