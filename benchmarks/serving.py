"""A server under load, on loopback. Input: a run. Output: throughput, latencies, exactness, memory.

Sixteen connections send a fixed mix of requests as fast as they are answered; each answer is compared with what the
library says in this process. Meanwhile another process asks for /health every 50 ms, and a hundred bad clients hold connections open,
send a byte now and then, or ask for long streams and go away.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vlhmm

PROBE = str(Path(__file__).parent / "health_probe.py")
CONNECTIONS = 16
BAD_CLIENTS = 100
Check = Callable[[dict[str, Any]], float]  # an answer -> how far it is from the library's


def bench_serving(run: str, requests: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Return the figures of one run: requests per second, seconds, differences, bytes."""
    model = vlhmm.load(run)
    mix = make_requests(model, seed)
    command = [sys.executable, "-m", "vlhmm", "serve", run, "--port", "0", "--threads", "1"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = None
        for line in server.stderr:
            found = found or re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if line.startswith("curl "):
                break
        if found is None:
            raise RuntimeError("the server did not start")
        return asyncio.run(load(int(found[1]), server.pid, mix, requests, seed)) | {"run": Path(run).name}
    finally:
        server.terminate()
        server.wait(30)


def make_requests(model: Any, seed: int) -> list[tuple[str, dict[str, Any], Check]]:
    """Return 200 requests, most of them scores, with a check of each answer."""
    draw = random.Random(seed)
    texts = [sample.text for sample in model.sample(400, max_tokens=30, seed=seed) if sample.words][:200]
    found: list[tuple[str, dict[str, Any], Check]] = []
    for number, text in enumerate(texts):
        kind = draw.choices(("score", "echo", "next", "complete"), (60, 20, 15, 5))[0]
        words = text.split()
        if kind == "score":
            found.append(
                ("/v1/score", {"text": text}, _difference(model.score(text), lambda answer: answer["log_prob"]))
            )
        elif kind == "echo":
            logs = [token.log_prob for token in model.token_scores(text, eos=False)][1:]
            body = {"prompt": text, "max_tokens": 0, "logprobs": 1, "echo": True}
            found.append(("/v1/completions", body, _differences(logs, lambda a: _echoed(a)[1:])))
        elif kind == "next":
            context = " ".join(words[:3])
            logs = [word.log_prob for word in model.next_word(context, 5)]
            body = {"context": context, "top_k": 5}
            found.append(("/v1/next", body, _differences(logs, lambda a: [w["log_prob"] for w in a["words"]])))
        else:
            body = {"prompt": " ".join(words[:2]), "max_tokens": 8, "logprobs": 0, "seed": number}
            found.append(("/v1/completions", body, _own_scores(model, words[:2])))
    return found


def _difference(expected: float, of: Callable[[dict[str, Any]], float]) -> Check:
    return lambda answer: abs(of(answer) - expected)


def _differences(expected: list[float], of: Callable[[dict[str, Any]], list[float]]) -> Check:
    return lambda answer: max((abs(a - b) for a, b in zip(of(answer), expected, strict=True)), default=0.0)


def _echoed(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def _own_scores(model: Any, prompt: list[str]) -> Check:
    """What was drawn has the log-probabilities that the library gives it."""
    known: dict[str, list[float]] = {}  # the same request has the same answer, so each text is scored once

    def check(answer: dict[str, Any]) -> float:
        text = answer["choices"][0]["text"]
        if text not in known:
            scored = model.token_scores([*prompt, *text.split()], eos=False)
            known[text] = [token.log_prob for token in scored[len(prompt) :]]
        return max((abs(a - b) for a, b in zip(_echoed(answer), known[text], strict=True)), default=0.0)

    return check


async def load(port: int, pid: int, mix: list[Any], requests: int, seed: int) -> dict[str, Any]:
    """Send the requests, ask for the server's health meanwhile, and keep bad clients at it."""
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS)]
    for number in range(len(mix)):  # once each: tables are made when they are first needed
        await ask(*connections[0], "POST", *mix[number][:2])
    latencies: list[float] = []
    worst, wrong, sent = 0.0, 0, 0
    memory = {0: resident(pid)}

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal worst, wrong, sent
        while sent < requests:
            path, body, check = mix[sent % len(mix)]
            sent += 1
            began = time.perf_counter()
            status, answer = await ask(reader, writer, "POST", path, body)
            latencies.append(time.perf_counter() - began)
            if status == 200:
                worst = max(worst, check(answer))
            else:
                wrong += 1
            if sent % (requests // 10) == 0:
                memory[sent] = resident(pid)

    probe = subprocess.Popen(
        [sys.executable, PROBE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    others = [asyncio.create_task(misbehave(port, number, seed)) for number in range(BAD_CLIENTS)]
    began = time.perf_counter()
    await asyncio.gather(*(work(*connection) for connection in connections))
    seconds = time.perf_counter() - began
    health = sorted(json.loads(probe.communicate()[0]))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _, writer in connections:
        writer.close()
    latencies.sort()
    return {
        "requests": len(latencies),
        "connections": CONNECTIONS,
        "bad_clients": BAD_CLIENTS,
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(latencies) / seconds, 1),
        "p50_ms": round(1000 * at(latencies, 0.5), 2),
        "p99_ms": round(1000 * at(latencies, 0.99), 2),
        "refused": wrong,
        "largest_difference_nats": worst,
        "health_asked": len(health),
        "health_p50_ms": round(1000 * at(health, 0.5), 2),
        "health_p99_ms": round(1000 * at(health, 0.99), 2),
        "health_max_ms": round(1000 * health[-1], 2),
        "resident_mb": {str(count): round(size / 1e6, 1) for count, size in memory.items()},
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }


async def ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Send one request over an open connection and read its answer."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    answer_head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = re.search(r"content-length: (\d+)", answer_head, re.IGNORECASE)
    answer = await reader.readexactly(int(length[1]) if length else 0)
    return int(answer_head.split()[1]), json.loads(answer)


async def misbehave(port: int, number: int, seed: int) -> None:
    """Hold a connection and send a byte now and then; or, one in ten, ask for a long stream and go away."""
    draw = random.Random(seed + number)
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            if number % 10 == 0:
                body = json.dumps({"prompt": "", "max_tokens": 200, "n": 4, "stream": True}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await asyncio.wait_for(reader.read(100), 30)
            else:
                writer.write(b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n")
                for _ in range(5):
                    writer.write(b"{")
                    await asyncio.sleep(draw.uniform(0.5, 2.0))
        except (OSError, TimeoutError):
            pass
        finally:
            writer.close()
        await asyncio.sleep(draw.uniform(0.5, 2.0))


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has in use (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def at(ordered: list[float], share: float) -> float:
    """Return a quantile of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
