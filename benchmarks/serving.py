"""A server under load, on loopback. Input: a run. Output: throughput, latencies, exactness, memory.

Sixteen connections send a fixed mix of requests as fast as they are answered; each answer is compared with what the
library says in this process. The mix has every kind of question: scores, echoed log-probabilities, next words,
completions, fills between both sides, templates under a constraint, posteriors, states. Meanwhile another process asks
for /health every 50 ms, and a hundred bad clients hold connections open, send a byte now and then, or ask for long
streams and go away.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import vlhmm
from vlhmm.analysis.inspect import Inspector
from vlhmm.analysis.stationary import usage_of

PROBE = str(Path(__file__).parent / "health_probe.py")
CONNECTIONS = 16
BAD_CLIENTS = 100
KINDS = {"score": 55, "echo": 16, "next": 15, "complete": 5, "suffix": 1, "infill": 1, "posteriors": 3, "state": 4}
Check = Callable[[dict[str, Any]], float]  # an answer -> how far it is from the library's
Request = tuple[str, dict[str, Any] | None, Check]  # path, body, check; without a body it is a GET


def bench_serving(run: str, requests: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Return the figures of one run: requests per second, seconds, differences, bytes."""
    model = vlhmm.load(run)
    mix = make_requests(model, run, seed)
    with serving(run) as (port, pid):
        return asyncio.run(load(port, pid, mix, requests, seed)) | {"run": Path(run).name}


@contextlib.contextmanager
def serving(run: str) -> Iterator[tuple[int, int]]:
    """Run a server of a run until the block ends; yield its port and its process id."""
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
        threading.Thread(target=server.stderr.read, daemon=True).start()  # so that it never blocks on a full pipe
        yield int(found[1]), server.pid
    finally:
        server.terminate()
        server.wait(30)


def make_requests(model: Any, run: str, seed: int) -> list[Request]:
    """Return 200 requests, most of them scores, with a check of each answer."""
    draw = random.Random(seed)
    inspector = Inspector(model, usage_of(model, run))
    texts = [sample.text for sample in model.sample(400, max_tokens=30, seed=seed) if sample.words][:200]
    found: list[Request] = []
    for number, text in enumerate(texts):
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
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
        elif kind == "suffix":
            body = {"prompt": " ".join(words[:2]), "suffix": " ".join(words[3:6] or ["."]), "max_tokens": 2, "seed": number}
            template = f"{body['prompt']} [MASK:1-2] {body['suffix']}"
            (fill,) = model.gaps(template, eos=False).sample(1, number)
            found.append(("/v1/completions", body, _fill(fill, lambda a: a["choices"][0])))
        elif kind == "infill":
            template = " ".join([*words[:2], "[MASK:1-2]", *words[3:8]])
            ready = model.gaps(template, constraint=vlhmm.must_contain("the"))
            (fill,) = ready.sample(1, number)
            body = {"template": template, "must_contain": "the", "seed": number}
            found.append(("/v1/infill", body, _fill(fill, lambda a: a["fills"][0], ready.log_constraint)))
        elif kind == "posteriors":
            text = " ".join(words[:12])
            (path,) = model.decode(text)
            expected = [path.log_prob, model.score(text)]
            found.append(
                ("/v1/posteriors", {"text": text}, _differences(expected, lambda a: [a["path_log_prob"], a["log_prob"]]))
            )
        elif kind == "state":
            (path,) = model.decode(" ".join(words[:3]))
            probabilities = [word.probability for word in inspector.state(path.states[0], 5).words]
            of = _differences(probabilities, lambda a: [w["probability"] for w in a["words"]])
            found.append((f"/v1/states/{path.states[0]}?top=5", None, of))
        else:
            body = {"prompt": " ".join(words[:2]), "max_tokens": 8, "logprobs": 0, "seed": number}
            found.append(("/v1/completions", body, _own_scores(model, words[:2])))
    return found


def _difference(expected: float, of: Callable[[dict[str, Any]], float]) -> Check:
    return lambda answer: abs(of(answer) - expected)


def _differences(expected: list[float], of: Callable[[dict[str, Any]], list[float]]) -> Check:
    return lambda answer: max((abs(a - b) for a, b in zip(of(answer), expected, strict=True)), default=0.0)


def _fill(fill: Any, of: Callable[[dict[str, Any]], dict[str, Any]], constraint: float | None = None) -> Check:
    """Return the words drawn are those that the library draws with this seed, as probable as it says."""

    def check(answer: dict[str, Any]) -> float:
        choice = of(answer)
        gaps = choice.get("gaps") or [choice["text"].strip()]
        if gaps != [" ".join(words) for words in fill.gaps]:
            return float("inf")
        told = 0.0 if constraint is None else abs(answer["constraint_log_prob"] - constraint)
        return max(told, float(abs(choice["log_prob"] - fill.log_prob)))

    return check


def _echoed(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def _own_scores(model: Any, prompt: list[str]) -> Check:
    """Return what was drawn has the log-probabilities that the library gives it."""
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
    first = await asyncio.open_connection("127.0.0.1", port)
    for path, body, _ in mix:  # once each: tables are made when they are first needed
        await ask(*first, path, body)
    first[1].close()
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS)]
    latencies: list[float] = []
    seconds_of: dict[str, list[float]] = {}
    worst, wrong, sent, shown = 0.0, 0, 0, 0.0
    memory = {0: resident(pid)}

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal worst, wrong, sent, shown
        while sent < requests:
            path, body, check = mix[sent % len(mix)]
            sent += 1
            began = time.perf_counter()
            status, answer = await ask(reader, writer, path, body)
            latencies.append(time.perf_counter() - began)
            seconds_of.setdefault(path.split("?")[0].rsplit("/", 1)[0] if body is None else path, []).append(latencies[-1])
            if status == 200:
                worst = max(worst, check(answer))
            else:
                wrong += 1
            if sent % (requests // 10) == 0:
                memory[sent] = resident(pid)
            if time.monotonic() - shown > 1 or sent == requests:
                shown = time.monotonic()
                rate = len(latencies) / max(1e-9, time.perf_counter() - started)
                print(f"\r{len(latencies):,} of {requests:,} requests  {rate:,.1f}/s", end="", file=sys.stderr, flush=True)

    probe = subprocess.Popen(
        [sys.executable, PROBE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    others = [asyncio.create_task(misbehave(port, number, seed)) for number in range(BAD_CLIENTS)]
    started = time.perf_counter()
    await asyncio.gather(*(work(*connection) for connection in connections))
    seconds = time.perf_counter() - started
    print(file=sys.stderr)
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
        "routes": {
            route: {
                "requests": len(each),
                "p50_ms": round(1000 * at(sorted(each), 0.5), 1),
                "p99_ms": round(1000 * at(sorted(each), 0.99), 1),
            }
            for route, each in sorted(seconds_of.items())
        },
        "refused": wrong,
        "largest_difference_nats": worst,
        "health_asked": len(health),
        "health_p50_ms": round(1000 * at(health, 0.5), 2),
        "health_p99_ms": round(1000 * at(health, 0.99), 2),
        "health_max_ms": round(1000 * health[-1], 2),
        "health_over_50_ms": sum(seconds > 0.05 for seconds in health),
        "resident_mb": {str(count): round(size / 1e6, 1) for count, size in memory.items()},
        "load_average": os.getloadavg()[0],
        "real_time": os.sched_getscheduler(0) != os.SCHED_OTHER,  # chrt: ahead of all other programs
        "cores": os.cpu_count(),
    }


async def ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    path: str,
    body: dict[str, Any] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Send one request over an open connection and read its answer."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
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
