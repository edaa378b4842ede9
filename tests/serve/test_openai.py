"""OpenAI's routes, by its own client and by their bodies."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttfm.data import Tokenizer
from fasttfm.serve.cohere import encoded
from fasttfm.serve.generation import Decoding

PROMPT = "The people of the"


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_lists_models(client: Any) -> None:
    assert [model.id for model in client.models.list()][:2] == ["embedder", "reranker"]
    assert client.models.retrieve("gpt").object == "model"


def test_the_client_embeds(client: Any, served: Any) -> None:
    texts = ["Peace and commerce.", "The army."]
    expected = served.post("/embed", {"inputs": texts})
    found = client.embeddings.create(model="embedder", input=texts)  # asks for base64
    np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 4
    floats = client.embeddings.create(model="embedder", input=texts[0], encoding_format="float", dimensions=16)
    assert len(floats.data[0].embedding) == 16


def test_base64_is_little_endian_fp32(served: Any) -> None:
    body = {"input": "Peace.", "model": "embedder"}
    (floats,) = served.post("/v1/embeddings", body)["data"]
    (encoded,) = served.post("/v1/embeddings", {**body, "encoding_format": "base64"})["data"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4"), np.float32(floats["embedding"])
    )


def test_vectors_of_bytes_are_those_of_cohere(served: Any) -> None:
    body = {"model": "embedder", "input": ["Peace.", "The army."]}
    floats = np.float32([each["embedding"] for each in served.post("/v1/embeddings", body)["data"]])
    for kind in ("int8", "uint8", "binary", "ubinary"):
        found = served.post("/v1/embeddings", {**body, "encoding_format": kind})["data"]
        assert [each["embedding"] for each in found] == encoded(floats, kind).tolist(), kind


def test_errors_have_openais_body(client: Any, served: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="unknown", input="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="encoding_format") as bad:
        client.embeddings.create(model="embedder", input="a", encoding_format="decimal")
    assert (bad.value.param, bad.value.type) == ("encoding_format", "invalid_request_error")
    body = served.refused("/v1/completions", {"prompt": "a", "model": "gpt", "logprobs": 2}, 400)
    assert "log-probabilities" in body["error"]["message"]


def test_the_client_completes(client: Any, folders: dict[str, Path]) -> None:
    found = client.completions.create(model="gpt", prompt=PROMPT, max_tokens=8, temperature=0)
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 8
    expected = continued(folders["gpt"], PROMPT, 8)
    assert found.choices[0].text.strip() == expected.strip()
    echoed = client.completions.create(model="gpt", prompt=PROMPT, max_tokens=8, temperature=0, echo=True)
    assert echoed.choices[0].text == PROMPT + found.choices[0].text


def continued(folder: Path, prompt: str, tokens: int) -> str:
    from fasttfm.data import load_tokenizer
    from fasttfm.generate import GenerationSession
    from fasttfm.inference.opening import open_with_stated_head

    tokenizer = load_tokenizer(folder)
    session = GenerationSession(open_with_stated_head(folder).eval())
    return tokenizer.decode(session.submit(tokenizer.encode(prompt), max_new_tokens=tokens).result())


def test_a_stream_is_the_whole_text(client: Any) -> None:
    options = {"model": "gpt", "prompt": [PROMPT, "Peace and"], "max_tokens": 12, "n": 2, "seed": 3}
    whole = client.completions.create(**options)
    texts = {choice.index: "" for choice in whole.choices}
    usage = None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len(set(texts.values())) > 1
    assert usage.completion_tokens == whole.usage.completion_tokens == 48


def test_stop_strings_end_a_completion(client: Any) -> None:
    whole = client.completions.create(model="gpt", prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
    stop = whole.split()[2]
    found = client.completions.create(model="gpt", prompt=PROMPT, max_tokens=12, temperature=0, stop=stop).choices[0]
    assert found.finish_reason == "stop"
    assert found.text == whole[: whole.index(stop)]


def test_a_prompt_that_is_too_long(served: Any) -> None:
    body = served.refused("/v1/completions", {"prompt": PROMPT, "model": "gpt", "max_tokens": 1000}, 400)
    assert body["error"]["code"] == "context_length_exceeded"
    assert "128" in body["error"]["message"]


@pytest.mark.parametrize("stop", [[], ["lo w"], ["é"], ["zzz"]])
def test_pieces_are_the_decoded_text(bpe: Tokenizer, stop: list[str]) -> None:
    """Characters of several tokens, and stop strings across tokens."""
    text = "hello world, ünïcödé 🙂 and more"
    ids = bpe.encode(text)
    decoding = Decoding(bpe, stop, set())
    pieces = [decoding.add([id]) for id in ids]
    pieces.append(decoding.finish())
    whole = bpe.decode(ids)
    expected = whole if not stop or stop[0] not in whole else whole[: whole.index(stop[0])]
    assert "".join(pieces) == expected
    assert decoding.stopped == (expected != whole)
