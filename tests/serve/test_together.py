"""Requests that arrive at the same time are read and computed together, and each gets its own answer."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from fasttfm.serve import errors
from fasttfm.serve.tokenization import Tokenization, _encode

LONG = "people " * 200
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/embed", {"inputs": "Peace and commerce."}),
    ("/embed", {"inputs": ["The army.", "The navy of this country."]}),
    ("/embed", {"inputs": "Peace and commerce.", "prompt_name": "query"}),
    ("/embed", {"inputs": "Peace.", "normalize": False}),
    ("/embed", {"inputs": LONG}),
    ("/embed", {"inputs": LONG, "truncation_direction": "left"}),
    ("/embed", {"inputs": LONG, "truncate": False}),
    ("/embed", {"inputs": ["Peace.", ""]}),
    ("/embed", {"inputs": [5, 6, 7]}),
    ("/embed", {"inputs": [10**6]}),
    ("/embed", {"inputs": "Peace.", "model": "masked"}),
    ("/rerank", {"query": "peace", "texts": ["Commerce.", "Peace."]}),
    ("/predict", {"inputs": [["Peace.", "War."]], "model": "classifier"}),
    ("/v1/embeddings", {"input": ["Peace.", "War."], "model": "embedder"}),
    ("/similarity", {"inputs": {"source_sentence": "Peace.", "sentences": ["War."]}}),
    ("/fill-mask", {"inputs": "The [MASK] of the people."}),
]


def numbers_of(answer: Any) -> list[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(answer, dict):
        return [number for key in sorted(answer) for number in numbers_of(answer[key])]
    if isinstance(answer, list):
        return [number for each in answer for number in numbers_of(each)]
    return [float(answer)] if isinstance(answer, (int, float)) else []


def test_each_request_gets_its_own_answer(served: Any) -> None:
    alone = [served.client.post(path, json=body) for path, body in REQUESTS]
    assert {response.status_code for response in alone} == {200, 400, 413, 422}

    async def send_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:
            requests = [client.post(path, json=body) for _ in range(4) for path, body in REQUESTS]
            return await asyncio.gather(*requests)

    for number, together in enumerate(asyncio.run(send_all())):
        expected = alone[number % len(REQUESTS)]
        assert together.status_code == expected.status_code
        np.testing.assert_allclose(numbers_of(together.json()), numbers_of(expected.json()), atol=1e-5)


class Reader:
    """A reader whose tokenizer fails for one text."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.characters: list[int] = []

    def texts(self, items: list[str], prompt: str) -> list[str]:
        return [prompt + item for item in items]

    def encode(self, texts: list[str]) -> list[list[int]]:
        self.calls.append(len(texts))
        self.characters.append(sum(map(len, texts)))
        if "unknown" in texts:
            raise ValueError("unknown")
        return [[len(text)] for text in texts]

    def sequences(self, items: list[str], encoded: Any, *, truncate: bool, left: bool) -> list[list[int]]:
        if not truncate:
            raise errors.too_long(1, 2)
        return list(encoded)


@pytest.mark.parametrize("size", [1, 2000])
def test_an_error_is_that_of_its_request(size: int) -> None:
    found: dict[int, Any] = {}

    async def read() -> None:
        reader, loop = Reader(), asyncio.get_running_loop()
        with ThreadPoolExecutor(2) as pool:
            tokenization, ended = Tokenization(pool), loop.create_future()

            def add(number: int, text: str, truncate: bool = True) -> None:
                def done(result: Any) -> None:
                    found[number] = result
                    if len(found) == 4:
                        ended.set_result(None)

                tokenization.add(reader, [text], done, truncate=truncate)  # type: ignore[arg-type]

            add(0, "a" * size)
            add(1, "unknown")
            add(2, "b" * size, truncate=False)
            add(3, "c" * size)
            await asyncio.wait_for(ended, 30)
        assert reader.calls[0] == 4  # together, and then each by itself
        assert len(reader.calls) == 5

    asyncio.run(read())
    assert found[0] == found[3] == [[size]]
    assert isinstance(found[1], ValueError)
    assert isinstance(found[2], errors.RequestError)


def test_pages_of_other_origins(served: Any) -> None:
    """The headers of CORS, on answers, errors and preflight requests, only where a browser sends an origin."""
    origin = {"origin": "https://example.org"}
    for body in ({"inputs": "Peace."}, {"inputs": ""}):
        assert served.client.post("/embed", json=body, headers=origin).headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-origin" not in served.client.post("/embed", json=body).headers
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = served.client.options("/embed", headers=asked)
    assert allowed.status_code == 200
    assert "POST" in allowed.headers["access-control-allow-methods"]


@pytest.mark.slow
def test_long_texts_block_no_short_one(served: Any) -> None:
    """Short requests are answered while the tokenizer reads texts of megabytes, on every route that reads some."""
    text = "the people of this country " * 40_000
    routes: list[tuple[str, dict[str, Any]]] = [
        ("/embed", {"inputs": [text[: len(text) // 8]] * 8}),
        ("/token-classification", {"inputs": text}),
        ("/tokenize", {"inputs": text}),
        ("/v2/rerank", {"query": "a", "documents": [text], "max_tokens_per_doc": 4}),
    ]
    body = {"inputs": ["Peace.", "War."]}
    with ThreadPoolExecutor(len(routes)) as pool:
        running = [pool.submit(served.new_client().post, path, json=long) for path, long in routes]
        seconds = []
        while not all(each.done() for each in running):
            begun = time.perf_counter()
            served.post("/embed", body)
            seconds.append(time.perf_counter() - begun)
    slowest = max(each.result().elapsed.total_seconds() for each in running)
    assert {each.result().status_code for each in running} <= {200, 413}
    assert len(seconds) > 1
    assert max(seconds) < slowest / 2


@pytest.mark.parametrize("sizes", [[], [1], [40_000, 40_000], [70_000, 1, 1], [1, 70_000, 70_000, 65_535, 1]])
def test_calls_of_the_tokenizer_are_bounded(sizes: list[int]) -> None:
    reader = Reader()
    encoded = _encode(reader, ["a" * size for size in sizes])  # type: ignore[arg-type]
    assert encoded == [[size] for size in sizes]
    assert all(calls == 1 or total <= 65_536 for calls, total in zip(reader.calls, reader.characters, strict=True))
