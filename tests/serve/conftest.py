"""One server with a small model for each head, in a thread of the tests' process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import bpe, wordpiece
from small_models import save_gpt

from fasttfm import models
from fasttfm.data import Tokenizer

__all__ = ["bpe", "wordpiece"]
for package in ("starlette", "uvicorn", "orjson", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[serve]' httpx")

LABELS = {"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC", "4": "I-LOC"}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
KINDS = {
    "embedder": ("BertModel", {}),
    "reranker": ("BertForSequenceClassification", {"num_labels": 1}),
    "classifier": ("BertForSequenceClassification", {"num_labels": 3}),
    "tagger": ("BertForTokenClassification", {"num_labels": 5}),
    "reader": ("BertForQuestionAnswering", {}),
    "masked": ("BertForMaskedLM", {}),
}


def save_model(kind: str, changes: dict[str, Any], tokenizer: Tokenizer, directory: Path) -> Path:
    torch.manual_seed(1)
    config = models.BertConfig(vocab_size=tokenizer.vocab_size, **{**SIZES, **changes})
    if changes.get("num_labels") == 5:
        config.extra["id2label"] = LABELS
    getattr(models, kind)(config).save_pretrained(directory)
    tokenizer.save(directory, model_max_length=128)
    return directory


def add_sentence_files(directory: Path) -> None:
    """Makes a sentence-transformers folder of it, with prompts and a Normalize module."""
    kinds = {"0": ("", "Transformer"), "1": ("1_Pooling", "Pooling"), "2": ("2_Normalize", "Normalize")}
    modules = [
        {"idx": int(index), "name": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in kinds.items()
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    prompts = {"prompts": {"query": "the people: ", "passage": "congress: "}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))


@pytest.fixture(scope="session")
def folders(wordpiece: Tokenizer, bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    saved = {name: save_model(kind, changes, wordpiece, root / name) for name, (kind, changes) in KINDS.items()}
    add_sentence_files(saved["embedder"])
    saved["gpt"] = save_gpt(bpe, root / "gpt")
    return saved


class Served:
    """A server that runs in a thread."""

    def __init__(self, folders: list[Path], *, keys: Path | None = None, **limits: Any) -> None:
        from fasttfm.serve.limits import Limits
        from fasttfm.serve.models import Source
        from fasttfm.serve.server import Settings, run

        sources = [Source(str(folder), folder.name, (torch.device("cpu"),)) for folder in folders]
        settings = Settings(sources, hostname="127.0.0.1", port=0, limits=Limits(**limits), key_file=keys)
        listening = threading.Event()

        def started(at: Any) -> None:
            self.at = at
            listening.set()

        def work() -> None:
            self.status = run(settings, started=started)

        self.status: int | None = None
        self._clients: list[Any] = []
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        assert listening.wait(60)
        self.url = f"http://127.0.0.1:{self.at.port}"
        self.client = self.new_client()

    def new_client(self) -> Any:
        """A client with connections of its own, which ``stop`` closes."""
        import httpx

        self._clients.append(httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False))
        return self._clients[-1]

    def wait_until_ready(self) -> Served:
        for _ in range(1200):
            if not self.thread.is_alive() or self.client.get("/health").status_code == 200:
                break
            threading.Event().wait(0.05)
        return self

    def post(self, path: str, body: Any, **options: Any) -> Any:
        """The answer to a body, which must be 200."""
        response = self.client.post(path, json=body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: Any, status: int) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    def stop(self) -> int | None:
        for client in self._clients:
            client.close()
        self.at.stop()
        self.thread.join(60)
        return self.status


@pytest.fixture(scope="session")
def served(folders: dict[str, Path]) -> Iterator[Served]:
    server = Served(list(folders.values())).wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts further servers, and stops them after the test."""
    begun: list[Served] = []

    def run(*arguments: Any, **options: Any) -> Served:
        begun.append(Served(*arguments, **options))
        return begun[-1]

    yield run
    for server in begun:
        server.stop()
