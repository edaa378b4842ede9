"""Over a hundred malformed requests: each gets a 4xx in words, and the server computes afterwards as before."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

JSON = {"content-type": "application/json"}
DEEP = "[" * 100_000 + "]" * 100_000
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "a space": b" ",
    "a word": b"hello",
    "a cut object": b'{"inputs": "a',
    "a cut array": b'{"inputs": ["a"',
    "a comma too many": b'{"inputs": ["a",]}',
    "single quotes": b"{'inputs': 'a'}",
    "two objects": b'{"inputs": "a"}{"inputs": "b"}',
    "a comment": b'{"inputs": "a"} // b',
    "NaN": b'{"inputs": NaN}',
    "Infinity": b'{"inputs": "a", "dimensions": Infinity}',
    "a byte order mark": b'\xef\xbb\xbf{"inputs": "a"}',
    "UTF-16": '{"inputs": "a"}'.encode("utf-16"),
    "invalid UTF-8": b'{"inputs": "\xff\xfe"}',
    "an overlong sequence": b'{"inputs": "\xc0\xaf"}',
    "a lone surrogate": b'{"inputs": "\\ud800"}',
    "a control character": b'{"inputs": "a\x01"}',
    "a zero byte": b'{"inputs": "a"}\x00',
    "deep arrays": f'{{"inputs": {DEEP}}}'.encode(),
    "deep objects": b'{"inputs": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "binary": bytes(range(256)),
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
    "an array": b"[]",
    "a string": b'"a"',
    "a number": b"1",
    "null": b"null",
    "true": b"true",
}
EMBED: dict[str, Any] = {
    "no inputs": {},
    "null inputs": {"inputs": None},
    "a number": {"inputs": 1},
    "an object": {"inputs": {"text": "a"}},
    "true": {"inputs": True},
    "an empty text": {"inputs": ""},
    "an empty array": {"inputs": []},
    "an empty text of several": {"inputs": ["a", ""]},
    "empty ids": {"inputs": ["a", []]},
    "a null of several": {"inputs": ["a", None]},
    "arrays of arrays": {"inputs": [[["a"]]]},
    "a pair": {"inputs": [["a", "b"]]},
    "a fraction as id": {"inputs": [1.5]},
    "a negative id": {"inputs": [-1]},
    "true as id": {"inputs": [True, 1]},
    "an id beyond the vocabulary": {"inputs": [10**6]},
    "a huge id": {"inputs": [2**63]},
    "a huger id": {"inputs": [10**30]},
    "33 texts": {"inputs": ["a"] * 33},
    "10,000 texts": {"inputs": ["a"] * 10_000},
    "truncate as a word": {"inputs": "a", "truncate": "yes"},
    "truncate as a number": {"inputs": "a", "truncate": 1},
    "an unknown direction": {"inputs": "a", "truncation_direction": "up"},
    "a direction of another type": {"inputs": "a", "truncation_direction": 1},
    "normalize as a word": {"inputs": "a", "normalize": "true"},
    "an unknown prompt": {"inputs": "a", "prompt_name": "nothing"},
    "a prompt of another type": {"inputs": "a", "prompt_name": ["query"]},
    "no dimensions": {"inputs": "a", "dimensions": 0},
    "negative dimensions": {"inputs": "a", "dimensions": -1},
    "dimensions beyond the width": {"inputs": "a", "dimensions": 65},
    "huge dimensions": {"inputs": "a", "dimensions": 2**62},
    "a fraction as dimensions": {"inputs": "a", "dimensions": 1.5},
    "a word as dimensions": {"inputs": "a", "dimensions": "8"},
    "an unknown model": {"inputs": "a", "model": "unknown"},
    "a model of another type": {"inputs": "a", "model": 1},
    "a model without the head": {"inputs": "a", "model": "gpt"},
}
OTHERS: list[tuple[str, Any]] = [
    ("/predict", {"inputs": []}),
    ("/predict", {"inputs": ["a", "b", "c"]}),
    ("/predict", {"inputs": [["a", "b", "c"]]}),
    ("/predict", {"inputs": [["a"], "b"]}),
    ("/predict", {"inputs": [[]]}),
    ("/predict", {"inputs": "a", "raw_scores": 1}),
    ("/rerank", {"query": "a"}),
    ("/rerank", {"texts": ["a"]}),
    ("/rerank", {"query": "a", "texts": []}),
    ("/rerank", {"query": "a", "texts": "b"}),
    ("/rerank", {"query": ["a"], "texts": ["b"]}),
    ("/rerank", {"query": "a", "texts": [1]}),
    ("/rerank", {"query": "", "texts": ["b"]}),
    ("/similarity", {"inputs": "a"}),
    ("/similarity", {"inputs": {"source_sentence": "a"}}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": 1}),
    ("/tokenize", {"inputs": 1}),
    ("/tokenize", {"inputs": [""]}),
    ("/decode", {"ids": "a"}),
    ("/decode", {"ids": [10**6]}),
    ("/decode", {"ids": [["a"]]}),
    ("/embed_sparse", {"inputs": []}),
    ("/embed_all", {"inputs": [None]}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/embeddings", {"inputs": "a"}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
    ("/v1/embeddings", {"input": "a", "user": 1}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**30}),
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/completions", {"prompt": "a", "temperature": 1e308}),
    ("/v1/completions", {"prompt": "a", "top_p": 0}),
    ("/v1/completions", {"prompt": "a", "n": 1000}),
    ("/v1/completions", {"prompt": "a", "stop": ["a"] * 9}),
    ("/v1/completions", {"prompt": "a", "stop": [""]}),
    ("/v1/completions", {"prompt": "a", "seed": "x"}),
    ("/v1/completions", {"prompt": "a", "stream": "yes"}),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 1}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v2/embed", {"texts": "a"}),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["float64"]}),
    ("/v2/embed", {"texts": ["a"], "input_type": "image"}),
    ("/v2/rerank", {"query": "a", "documents": [{"title": "b"}]}),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": 0}),
    ("/question-answering", {"inputs": {"question": "a"}}),
    ("/question-answering", {"inputs": {"question": "", "context": "b"}}),
    ("/fill-mask", {"inputs": "no mask"}),
    ("/fill-mask", {"inputs": "[MASK]", "parameters": {"top_k": 0}}),
    ("/token-classification", {"inputs": [""]}),
    ("/token-classification", {"inputs": "a", "parameters": {"aggregation_strategy": "x"}}),
]
HEADERS: dict[str, dict[str, str]] = {
    "no type": {"content-type": ""},
    "plain text": {"content-type": "text/plain"},
    "a form": {"content-type": "application/x-www-form-urlencoded"},
    "gzip": {**JSON, "content-encoding": "gzip"},
    "brotli": {**JSON, "content-encoding": "br"},
}
RAW: dict[str, bytes] = {
    "no HTTP": b"hello\r\n\r\n",
    "an unknown version": b"POST /embed HTTP/9.9\r\nhost: a\r\n\r\n",
    "a header without a colon": b"POST /embed HTTP/1.1\r\nhost a\r\n\r\n",
    "a negative length": b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    "a word as length": b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
    "a huge length": b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"content-length: 99999999999\r\n\r\n",
    "a wrong chunk": b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk that is not JSON": b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n2\r\n{x\r\n0\r\n\r\n",
    "a huge path": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    "a header with a zero byte": b"GET /info HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    "two lengths": b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "a length and chunks": b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
}


def test_there_are_a_hundred() -> None:
    assert len(BODIES) + len(EMBED) + len(OTHERS) + len(HEADERS) + len(RAW) >= 100


def check(response: Any) -> None:
    """A 4xx whose body is JSON with a sentence."""
    assert 400 <= response.status_code < 500, response.text
    found = response.json()
    message = found.get("message") or found["error"]
    message = message["message"] if isinstance(message, dict) else message
    assert len(message.split()) >= 3
    assert len(message) < 500


def still_computes(served: Any) -> None:
    assert len(served.post("/embed", {"inputs": "Peace."})[0]) == 64


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/rerank"])
def test_bodies(served: Any, path: str) -> None:
    for content in BODIES.values():
        check(served.client.post(path, content=content, headers=JSON))
    still_computes(served)


def test_fields(served: Any) -> None:
    for name, body in EMBED.items():
        response = served.client.post("/embed", content=json.dumps(body).encode(), headers=JSON)
        assert response.status_code != 200, name
        check(response)
    still_computes(served)


def test_fields_of_other_routes(served: Any) -> None:
    for path, body in OTHERS:
        response = served.client.post(path, content=json.dumps(body).encode(), headers=JSON)
        assert response.status_code != 200, (path, body)
        check(response)
    still_computes(served)


def test_headers(served: Any) -> None:
    for headers in HEADERS.values():
        response = served.client.post("/embed", content=b'{"inputs": "a"}', headers=headers)
        check(response)
        assert response.status_code == 415
    still_computes(served)


def test_routes(served: Any) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/embed", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/page/../server.py", 404),
        ("GET", "/page/%2e%2e/server.py", 404),
        ("GET", "/v1/models/unknown", 404),
    ):
        response = served.client.request(method, path)
        check(response)
        assert response.status_code == status, path


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_request(served: Any, name: str) -> None:
    with socket.create_connection(("127.0.0.1", served.at.port), timeout=20) as connection:
        connection.sendall(RAW[name])
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert len(answer.partition(b"\r\n\r\n")[2].split()) >= 3
    still_computes(served)


def test_texts_do_not_return_in_errors(served: Any) -> None:
    secret = "the secret of the people"
    answer = served.client.post("/embed", json={"inputs": "a", "normalize": secret}).text
    assert secret not in answer
