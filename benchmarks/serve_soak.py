"""The soak of ``fasttfm serve``, and the time to the first token of a stream; ``serve_load.py`` calls both."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serve_contenders import run_async, session_of, start_ours

_CLIENTS = 24
_LIMITS = ("--max-concurrent-requests", "20", "--max-client-batch-size", "32")
_BAD = (
    b"",
    b"{",
    b"null",
    b'{"input": 1}',
    b'{"input": ""}',
    b'{"input": ["a", null]}',
    b'{"input": "a", "dimensions": -1}',
    b'{"input": "a", "model": "unknown"}',
    b'{"input": "\xff"}',
    b"[" * 5000,
    json.dumps({"input": ["a"] * 33}).encode(),
)


class Soak:
    """Counts of answers; every vector is compared with the session's."""

    def __init__(self, port: int, model: str, texts: list[str], expected: np.ndarray, tolerance: float) -> None:
        self.port, self.model, self.texts, self.expected = port, model, texts, expected
        self.tolerance = tolerance
        self.latencies: list[float] = []
        self.counts = {"answered": 0, "wrong": 0, "lost": 0, "refused": 0, "bad": 0, "disconnected": 0, "5xx": 0}

    async def client(self, seed: int, end: float) -> None:
        generator = random.Random(seed)
        while time.perf_counter() < end:
            kind = generator.random()
            try:
                if kind < 0.04:
                    await self._disconnect(generator)
                elif kind < 0.08:
                    await self._malformed(generator)
                else:
                    await self._embed(generator)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError):
                self.counts["lost"] += 1

    async def _send(self, body: bytes, path: str = "/v1/embeddings", *, cut: bool = False) -> tuple[Any, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        sent = body[: len(body) // 2] if cut else body
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + sent)
        return reader, writer

    async def _answer(self, body: bytes, path: str = "/v1/embeddings") -> tuple[int, bytes]:
        reader, writer = await self._send(body, path)
        try:
            head, _, content = (await asyncio.wait_for(reader.read(-1), 60)).partition(b"\r\n\r\n")
            return int(head[9:12]), content
        finally:
            writer.close()

    async def _embed(self, generator: random.Random) -> None:
        """A request of one of two routes: OpenAI's with base64, TEI's with numbers."""
        indices = generator.sample(range(len(self.texts)), generator.choice((1, 1, 1, 4, 32)))
        texts = [self.texts[index] for index in indices]
        is_openai = generator.random() < 0.5
        body = {"model": self.model, "input": texts, "encoding_format": "base64"} if is_openai else {"inputs": texts}
        begun = time.perf_counter()
        status, content = await self._answer(json.dumps(body).encode(), "/v1/embeddings" if is_openai else "/embed")
        if status in (429, 503):
            self.counts["refused"] += 1
            await asyncio.sleep(0.01)
            return
        if status != 200:
            self.counts["5xx" if status >= 500 else "wrong"] += 1
            return
        self.latencies.append(time.perf_counter() - begun)
        found = json.loads(content)
        if is_openai:
            rows = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in found["data"]])
        else:
            rows = np.array(found, np.float32)
        self.counts["answered" if self._is_right(rows, indices) else "wrong"] += 1

    def _is_right(self, rows: np.ndarray, indices: list[int]) -> bool:
        """Whether every vector is near the one that the session computed for its text, and nearer than to any other."""
        near = np.abs(rows - self.expected[indices]).max() <= self.tolerance
        return bool(near) and (rows @ self.expected.T).argmax(1).tolist() == indices

    async def _malformed(self, generator: random.Random) -> None:
        status, _ = await self._answer(generator.choice(_BAD))
        if status == 429:
            self.counts["refused"] += 1
        else:
            self.counts["bad" if 400 <= status < 500 else "5xx"] += 1

    async def _disconnect(self, generator: random.Random) -> None:
        """Within the body, while it is tokenized or computed, or while the answer is written."""
        body = json.dumps({"model": self.model, "input": generator.sample(self.texts, 8)}).encode()
        _, writer = await self._send(body, cut=generator.random() < 0.3)
        await writer.drain()
        await asyncio.sleep(generator.choice((0.0, 0.001, 0.03, 0.2)))
        writer.close()
        self.counts["disconnected"] += 1


def soak(options: Any, folder: Path, texts: list[str]) -> list[dict[str, Any]]:
    """Mixed traffic over a limit of requests in flight, with a reload every ten seconds."""
    with session_of(options, folder) as session:
        vectors = session.encode(texts)
        exact = options.device == "cpu" and session.precision is None and session.dtype == torch.float32
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    tolerance = 2e-5 if exact else 2e-2
    with tempfile.TemporaryDirectory() as logs:
        server = start_ours(options, folder, Path(logs) / "log", *_LIMITS)
        assert server.process is not None
        state = Soak(server.port, server.model, texts, expected, tolerance)
        memory: list[float] = []

        async def watch(end: float) -> None:
            reload = time.perf_counter() + 10
            while time.perf_counter() < end:
                await asyncio.sleep(1)
                memory.append(server.process.memory())
                if time.perf_counter() > reload:
                    server.process.popen.send_signal(signal.SIGHUP)
                    reload += 10

        async def run() -> None:
            end = time.perf_counter() + options.soak
            await asyncio.gather(watch(end), *(state.client(seed, end) for seed in range(_CLIENTS)))

        run_async(run())
        status = server.process.stop()
        server.process = None
    third = max(1, len(memory) // 3)
    middle, last = (float(np.median(part)) for part in (memory[third : 2 * third], memory[2 * third :] or memory))
    p50, p90, p99 = np.percentile(state.latencies or [np.nan], [50, 90, 99]) * 1e3
    counts = ", ".join(f"{value} {name}" for name, value in state.counts.items())
    note = f"{counts}; {middle:.0f} MiB in the second third, {last:.0f} in the last; exit status {status}"
    errors = state.counts["wrong"] + state.counts["lost"] + state.counts["5xx"] + (status != 0)
    rate = len(state.latencies) / options.soak
    row = {"part": "soak", "contender": "fasttfm serve", "load": f"{_CLIENTS} clients, {options.soak:g} s"}
    row |= {"requests": len(state.latencies), "per_second": round(rate, 1), "errors": errors, "note": note}
    row |= _latencies(p50, p90, p99)
    print(row, flush=True)
    return [row]


def _latencies(*percentiles: float) -> dict[str, float]:
    names = ("ms_p50", "ms_p90", "ms_p99")
    return {name: round(float(value), 3) for name, value in zip(names, percentiles, strict=True)}


def first_tokens(options: Any, scratch: Path) -> list[dict[str, Any]]:
    """The time to the first token: of a generation session in this process, and of a stream."""
    import torch

    from fasttfm.data import train_tokenizer
    from fasttfm.generate import GenerationSession
    from fasttfm.models import GPT2Config, GPT2LMHeadModel

    tokenizer = train_tokenizer("bpe", ["the people of the united states and the congress of this country"] * 4, 400)
    folder = scratch / "gpt2"
    sizes = {} if options.device == "cuda" else {"n_layer": 2, "n_embd": 128, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    model.save_pretrained(folder)
    tokenizer.save(folder)
    ids = (tokenizer.encode("the people of the united states ") * 8)[:64]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    session = GenerationSession(model.to(options.device, dtype), max_batch=32)
    submitted, count = [], 40
    for _ in range(count):
        begun = time.perf_counter()
        generation = session.submit(ids, max_new_tokens=8)
        next(iter(generation))
        submitted.append(time.perf_counter() - begun)
        generation.cancel()
    with tempfile.TemporaryDirectory() as logs:
        server = start_ours(options, folder, Path(logs) / "log")
        served = run_async(_streams(server.port, server.model, ids, count))
        server.stop()
    rows = []
    for name, seconds in (("GenerationSession", submitted), ("fasttfm serve", served)):
        p50, p90, p99 = np.percentile(seconds[count // 4 :], [50, 90, 99]) * 1e3
        row = {"part": "time to the first token", "contender": name, "load": "1 stream", "requests": len(seconds)}
        row |= {"per_second": round(float(1e3 / p50), 1), "errors": 0, "note": f"{len(ids)} tokens in the prompt"}
        row["model"] = "gpt2" if options.device == "cuda" else "gpt2, 2 layers of 128"
        rows.append({**row, **_latencies(p50, p90, p99)})
    rows[1]["note"] += f"; {rows[1]['ms_p50'] - rows[0]['ms_p50']:.3f} ms above the model's at p50"
    for row in rows:
        print(row, flush=True)
    return rows


async def _streams(port: int, model: str, ids: list[int], count: int) -> list[float]:
    body = json.dumps({"model": model, "prompt": ids, "stream": True, "max_tokens": 8, "temperature": 0}).encode()
    latencies = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        begun = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"data: ")
        latencies.append(time.perf_counter() - begun)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.read(-1)
        writer.close()
    return latencies
