"""`vlhmm serve` as a process: what it prints, bad connections, clients that go away, its end."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import vlhmm  # noqa: E402
from server.conftest import serve  # noqa: E402
from vlhmm.cli.main import main  # noqa: E402


def call(served, path, body=None, timeout=20):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(served.address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def metric(served, name):
    with urllib.request.urlopen(served.address + "/metrics", timeout=10) as answer:
        return next(float(line.split()[-1]) for line in answer.read().decode().splitlines() if line.startswith(name))


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_the_printed_curl_line_works(served):
    answer = subprocess.run(served.curl, shell=True, capture_output=True, check=True, timeout=30).stdout
    assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "length")


def test_scores_over_http_are_the_librarys(served, run_folder):
    model = vlhmm.load(run_folder)
    for text in ("the big dog runs .", "dogs the", "unheard"):
        assert call(served, "/v1/score", {"text": text})["log_prob"] == pytest.approx(model.score(text), abs=1e-6)


def test_random_bytes_and_broken_requests_leave_the_server_well(served):
    draw = random.Random(0)
    starts = [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n",
    ]
    for number in range(60):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
            connection.sendall(starts[number % 3] + draw.randbytes(draw.randrange(400)))
            if number % 2:
                connection.shutdown(socket.SHUT_WR)
    assert call(served, "/health")["status"] == "ok"
    assert call(served, "/v1/score", {"text": "the dog"})["num_tokens"] == 3


def test_a_body_that_never_comes_keeps_nobody_waiting(served):
    head = b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"
    slow = [socket.create_connection(("127.0.0.1", served.port), timeout=5) for _ in range(100)]
    try:
        for connection in slow:
            connection.sendall(head)
        began = time.monotonic()
        assert call(served, "/v1/score", {"text": "the dog"})["num_tokens"] == 3
        assert time.monotonic() - began < 2
    finally:
        for connection in slow:
            connection.close()


def test_a_head_that_never_ends_does_not_hold_its_connection(run_folder, monkeypatch):
    """The timer itself, with a short time: bytes now and then do not prolong it, and a whole request ends it."""
    import asyncio

    import uvicorn

    from vlhmm.server import connection

    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)

    async def answer(scope, receive, send):
        await asyncio.sleep(0.6)  # longer than a head may take
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run():
        settings = uvicorn.Config(answer, http=connection.Connection, ws="none", lifespan="off", log_level="error")
        settings.load()
        state = uvicorn.Server(settings).server_state
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: connection.Connection(settings, state, {}), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        slow_reader, slow = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        began = loop.time()
        for byte in b"GET /":
            slow.write(bytes([byte]))
            await asyncio.sleep(0.05)
        assert await asyncio.wait_for(slow_reader.read(), 5) == b"" and loop.time() - began < 0.5
        assert b"ok" in await asyncio.wait_for(reader.readuntil(b"ok"), 5)
        for each in (slow, writer):
            each.close()
        listening.close()

    asyncio.run(run())


def test_a_client_that_goes_away_stops_its_work(served):
    body = json.dumps({"prompt": "the", "max_tokens": 1000, "n": 60, "stream": True, "temperature": 50}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head + body)
        assert b"200 OK" in connection.recv(4096)
    assert until(lambda: metric(served, "vlhmm_requests_in_flight") == 0 and metric(served, "vlhmm_jobs_waiting") == 0)


def test_sigterm_ends_it_with_exit_code_0(run_folder):
    with serve(run_folder, "--grace", "2") as served:
        body = json.dumps({"prompt": "the", "max_tokens": 1000, "n": 60, "stream": True, "temperature": 50}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(head + body)
            connection.recv(4096)
            os.kill(served.process.pid, signal.SIGTERM)
            assert served.process.wait(8) == 0


def test_wrong_settings_get_one_line(capsys, run_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for arguments in (
            ["serve", str(run_folder), "--port", str(taken.getsockname()[1])],
            ["serve", str(run_folder), "--port", "99999"],
            ["serve", str(run_folder), "--max-concurrent", "0"],
            ["serve", str(run_folder / "nothing")],
            ["explore", str(run_folder), "--export", str(run_folder / "x"), "--top-states", "0"],
        ):
            assert main([*arguments, "--quiet"]) == 2
            assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_without_the_extra_it_says_what_to_install(capsys, run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["serve", str(run_folder)]) == 2
    assert "vlhmm[serve]" in capsys.readouterr().err


def test_another_address_says_what_it_means(run_folder, capsys, monkeypatch):
    import uvicorn

    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: [s.close() for s in sockets])
    assert main(["serve", str(run_folder), "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "every machine that can reach this one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "not a host"], "choose another --host"),
        (["--host", "\u00e4" * 80], "no host has such a name"),
        (["--host", ""], "the address is empty"),
        (["--host", "8.8.8.8"], "choose another --host"),
        (["--api-key", ""], "an empty key"),
        (["--api-key", "a\nb"], "no HTTP header has"),
        (["--api-key", "\u20ac"], "no HTTP header has"),
        (["--name", "a\nb"], "--name"),
        (["--max-seconds", "0"], "--max-seconds"),
    ],
)
def test_addresses_keys_and_names_that_cannot_be_are_refused_before_the_model_is_loaded(capsys, options, said):
    assert main(["serve", "/no/such/run", "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_key_of_the_environment_is_checked_too(capsys, monkeypatch):
    """The server started, and no request could have had such a key."""
    for key in ("\u20ac", " \t", "a\nb"):
        monkeypatch.setenv("VLHMM_API_KEY", key)
        assert main(["serve", "/no/such/run", "--port", "0"]) == 2
        assert "VLHMM_API_KEY: got" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(capsys, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "site"):
        assert main(["explore", "/no/such/run", "--export", str(folder)]) == 2
        error = capsys.readouterr().err
        assert f"cannot write to {folder}" in error and error.count("\n") == 1
