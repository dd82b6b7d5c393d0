"""Ask a server's /health every 50 ms from a process of its own, so that nobody else's work is in the figures.

    python benchmarks/health_probe.py PORT

until standard input is closed; then the seconds of every answer are printed as JSON.
"""

import json
import select
import socket
import sys
import time


def main() -> None:
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = []
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        began = time.perf_counter()
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # the head and the body may come apart
            part = connection.recv(65536)
            if not part:
                raise SystemExit("the server closed the connection")
            answer += part
        seconds.append(time.perf_counter() - began)
        if b" 200 " not in answer:
            raise SystemExit(f"/health answered {answer[:80]!r}")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
