"""One end of a TCP stream that measures goodput. Run by path, with the standard library only, on an emulated host.

goodput_probe.py receive ADDRESS NUM_STREAMS     prints "port P", then one "SENDER_ADDRESS BYTES_PER_S" for each
stream goodput_probe.py send ADDRESS SENDER_ADDRESS PORT SECONDS
"""

import socket
import sys
import threading
import time

_BLOCK_BYTES = 1 << 18
_WARM_UP = 0.3  # part of a stream that is not counted: slow start and the token bucket's burst


def _receive_stream(connection: socket.socket, sender: str) -> None:
    seconds = float(connection.recv(16, socket.MSG_WAITALL).decode())
    block = bytearray(_BLOCK_BYTES)
    start = time.monotonic()
    counted_from = None
    num_bytes = 0
    now = start
    while received := connection.recv_into(block):
        now = time.monotonic()
        if counted_from is not None:
            num_bytes += received
        elif now - start >= seconds * _WARM_UP:
            counted_from = now
    span = now - counted_from if counted_from is not None else 0.0
    print(sender, num_bytes / span if span > 0 else 0.0, flush=True)
    connection.close()


def _receive(address: str, num_streams: int) -> None:
    with socket.create_server((address, 0), backlog=num_streams) as server:
        print("port", server.getsockname()[1], flush=True)
        threads = []
        for _ in range(num_streams):
            connection, peer = server.accept()
            threads.append(threading.Thread(target=_receive_stream, args=(connection, peer[0])))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _send(address: str, sender: str, port: int, seconds: float) -> None:
    block = bytes(_BLOCK_BYTES)
    with socket.create_connection((address, port), timeout=30, source_address=(sender, 0)) as connection:
        connection.settimeout(30)
        connection.sendall(f"{seconds:16.6f}".encode())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2], int(sys.argv[3]))
    else:
        _send(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
