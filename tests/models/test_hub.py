"""Models by their hub ids: from a cache in the hub's layout, downloads from a fake hub, and errors."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_fixtures import bert_directory, wordpiece

from fasttfm import models
from fasttfm.cli.main import main
from fasttfm.data import load_tokenizer
from fasttfm.inference.opening import family_of
from fasttfm.models import CheckpointError
from fasttfm.models.hub import Part, model_directory, weight_files

hub: Any = pytest.importorskip("huggingface_hub", reason="it comes with transformers")
for module in ("constants", "errors"):
    importlib.import_module(f"huggingface_hub.{module}")

__all__ = ["bert_directory", "wordpiece"]

NAME = "org/small-bert"
COMMIT = hashlib.sha1(b"first").hexdigest()


def add_to_cache(name: str, source: Path, files: list[str], commit: str = COMMIT) -> Path:
    """Files of a directory as the hub's cache keeps them: blobs, links to them under the commit, and the branch."""
    folder = Path(hub.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for file in files:
        content = (source / file).read_bytes()
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return snapshot


def names_in(directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]


def described(files: list[str]) -> Any:
    """A model's files in the form of the hub's API."""
    return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate cache, and no network: requests fail."""

    def unreachable(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "model_info", unreachable)
    monkeypatch.setattr(hub, "snapshot_download", unreachable)


@pytest.fixture
def online(bert_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub with one model, some of whose files are not needed; returns the recorded calls."""
    remote = tmp_path / "remote"
    shutil.copytree(bert_directory, remote)
    for name in ("pytorch_model.bin", "tf_model.h5", "onnx/config.json", "1_Pooling/config.json", "README.md"):
        (remote / name).parent.mkdir(exist_ok=True)
        (remote / name).write_text("{}")
    calls: list[dict[str, Any]] = []

    def download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        calls.append({"name": name, "files": set(allow_patterns), **options})
        return str(add_to_cache(name, remote, allow_patterns))

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "model_info", lambda name, **_: described(names_in(remote)))
    monkeypatch.setattr(hub, "snapshot_download", download)
    return calls


# ---- from the cache --------------------------------------------------------------------------------------------------


def test_the_cache_is_read_without_network(bert_directory: Path) -> None:
    snapshot = add_to_cache(NAME, bert_directory, names_in(bert_directory))
    expected = models.BertForMaskedLM.from_pretrained(bert_directory).state_dict()
    for name, options in ((NAME, {}), (f"{NAME}@main", {}), (NAME, {"revision": COMMIT}), (snapshot, {})):
        found = models.BertForMaskedLM.from_pretrained(name, **options).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert model_directory(NAME) == snapshot
    assert load_tokenizer(NAME).vocab_size == load_tokenizer(bert_directory).vocab_size
    assert models.BertConfig.from_pretrained(NAME).vocab_size == load_tokenizer(NAME).vocab_size
    assert family_of(NAME).config is models.BertConfig


def test_a_command_takes_a_hub_id(bert_directory: Path, tmp_path: Path) -> None:
    add_to_cache(NAME, bert_directory, names_in(bert_directory))
    texts, output = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("Peace and commerce.\n")
    assert main(["embed", "--model", NAME, "--data", str(texts), "--output", str(output), "--device", "cpu"]) == 0
    assert output.is_file()


def test_a_directory_precedes_the_hub(bert_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / NAME).symlink_to(bert_directory)
    monkeypatch.chdir(tmp_path)
    assert model_directory(NAME) == Path(NAME)
    with pytest.raises(ValueError, match="revision: expected none with a directory, got 'v1'"):
        model_directory(NAME, revision="v1")


def test_weights_in_several_files_must_all_be_in_the_cache(bert_directory: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    models.BertForMaskedLM.from_pretrained(bert_directory).save_pretrained(sharded, shard_bytes=100_000)
    files = sorted(names_in(sharded))
    assert len(files) > 3
    add_to_cache(NAME, sharded, [file for file in files if "model-00002" not in file])
    with pytest.raises(CheckpointError, match="has a part of this model, but not its weights; HF_HUB_OFFLINE is set"):
        model_directory(NAME)
    add_to_cache(NAME, sharded, files)
    assert isinstance(models.BertForMaskedLM.from_pretrained(NAME), models.BertForMaskedLM)


# ---- downloads -------------------------------------------------------------------------------------------------------


def test_a_download_takes_one_set_of_weights_and_says_so(online: list[dict[str, Any]]) -> None:
    with pytest.warns(UserWarning, match=f"{NAME}: there is no such path; downloading https://.*/{NAME} to"):
        models.BertForMaskedLM.from_pretrained(NAME, revision="main", token="hf_x")
    (call,) = online
    assert (call["name"], call["revision"], call["token"]) == (NAME, "main", "hf_x")
    assert {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"} <= call["files"]
    assert call["files"].isdisjoint({"pytorch_model.bin", "tf_model.h5", "onnx/config.json", "README.md"})
    models.BertForMaskedLM.from_pretrained(NAME)
    assert len(online) == 1  # the second time it is in the cache


@pytest.mark.filterwarnings("ignore:.*downloading")
def test_a_tokenizer_needs_no_weights(online: list[dict[str, Any]]) -> None:
    load_tokenizer(NAME)
    assert "model.safetensors" not in online[-1]["files"]
    model_directory(NAME, Part.CONFIG)
    assert len(online) == 1
    model_directory(NAME)
    assert "model.safetensors" in online[-1]["files"]


def test_weight_files() -> None:
    index = "model.safetensors.index.json"
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert weight_files(["pytorch_model.bin", "model.safetensors", index]) == ["model.safetensors"]
    assert weight_files(["pytorch_model.bin", *shards, index]) == [index, *shards]
    assert weight_files(["pytorch_model.bin", "flax_model.msgpack"]) == ["pytorch_model.bin"]
    assert weight_files(["model.pkl", "training_args.bin"]) == []


@pytest.mark.usefixtures("online")
def test_a_model_without_weights_that_are_safe_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "model_info", lambda *_, **__: described(["config.json", "model.pkl"]))
    with pytest.raises(CheckpointError, match=r"no model.safetensors and no pytorch_model.bin; its files: model.pkl"):
        model_directory(NAME)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"no such path; .* needs huggingface_hub: pip install 'fasttfm\[hub\]'"):
        model_directory("bert-base-uncased")


def test_offline_names_the_cache_and_what_is_similar(bert_directory: Path) -> None:
    add_to_cache(NAME, bert_directory, ["config.json"])
    with pytest.raises(CheckpointError, match=rf"cache \(.*\) has no such model \(in the cache: {NAME}\); HF_HUB_OFF"):
        model_directory("org/smal-bert")
    with pytest.raises(CheckpointError, match="has no revision 'v2' of such a model"):
        model_directory(f"{NAME}@v2")
    with pytest.raises(CheckpointError, match="has a part of this model, but not its tokenizer"):
        load_tokenizer(NAME)


@pytest.mark.parametrize("name", ["./run", "/run/model", "runs/first/model", "run/", "org/..", "a--b", "a@", "~/run"])
def test_what_is_no_hub_id_is_a_path(name: str) -> None:
    with pytest.raises(CheckpointError, match="a directory with a model or a hub id; there is no such directory"):
        model_directory(name)


def test_a_path_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a directory with a model, there is none"):
        model_directory(Path("bert-base-uncased"))
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="expected a directory with a model, got a file"):
        model_directory(str(file))
    with pytest.raises(ValueError, match="revision: expected one, got 'a' and 'b'"):
        model_directory("bert@a", revision="b")


@pytest.mark.usefixtures("online")
def test_an_unreachable_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub retries some requests for half a minute, which would delay the error for a mistyped name."""
    asked: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        api = hub.HfApi(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")

        def ask(name: str, *, timeout: float, **options: Any) -> Any:
            asked.append(timeout)
            return api.model_info(name, timeout=timeout, **options)

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return
                connections.append(None)

        connections: list[None] = []
        monkeypatch.setattr(hub, "model_info", ask)
        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        with pytest.raises(CheckpointError, match="cannot be reached: "):
            model_directory(NAME)
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "30")
        monkeypatch.setattr(hub.constants, "HF_HUB_ETAG_TIMEOUT", 30)
        with pytest.raises(CheckpointError, match="cannot be reached: "):
            model_directory(NAME)
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert asked == [5.0, 30]
    assert len(connections) == 2


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("RepositoryNotFoundError", "there is no such path here and no such model at https://huggingface.co"),
        ("GatedRepoError", "accept its terms at https://huggingface.co/org/small-bert and log in"),
        ("RevisionNotFoundError", "has no revision 'v9'"),
        ("LocalEntryNotFoundError", "https://huggingface.co cannot be reached: "),
    ],
)
@pytest.mark.usefixtures("online")
def test_errors_of_the_hub_are_reported_readably(kind: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        cls = getattr(hub.errors, kind)
        raise cls.__new__(cls)  # their constructors want an HTTP response

    monkeypatch.setattr(hub, "model_info", refuse)
    with pytest.raises(CheckpointError, match=sentence) as error:
        model_directory(NAME, revision="v9")
    assert "\n" not in str(error.value)
