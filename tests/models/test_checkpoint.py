"""Checkpoint directories: read and written with the same bits as by transformers; errors name what is broken."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from model_parity import GPT_SIZES, ROBERTAS, config_of, same_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm import models
from fasttfm.models import CheckpointError, checkpoint_files

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 11,
}
ENCODERS = ("Bert", *ROBERTAS, "Albert", "Electra", "DistilBert", "ModernBert", "MPNet", "DebertaV2")
CLASSES = [
    name
    for name in models.__all__
    if name.startswith(ENCODERS) and not name.endswith(("Config", "KagNet")) and name != "ElectraForJointPreTraining"
]


def model(name: str = "BertForMaskedLM", **changes: Any) -> Any:
    torch.manual_seed(0)
    own = {"pad_token_id": 0} if name.startswith("ModernBert") else {}
    made = getattr(models, name)(config_of(models, name, {**SIZES, **own, **changes}))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this code must not run",)


def stored(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


# ---- to transformers and back ----------------------------------------------------------------------------------------


UNTIED = [
    "BertForPreTraining",
    *(f"{family}ForMaskedLM" for family in ("Bert", "Roberta", "MPNet", "Albert", "Electra", "DebertaV2")),
]


@pytest.mark.parametrize(("name", "tied"), [*((name, True) for name in CLASSES), *((name, False) for name in UNTIED)])
def test_transformers_reads_ours_and_we_read_theirs(name: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    labels = {"num_labels": 5} if "QuestionAnswering" not in name else {}
    ours = model(name, tie_word_embeddings=tied, **labels)
    ours.save_pretrained(tmp_path / "ours")
    theirs, info = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    # An untied decoder does not use the head's bias.
    beside_decoder = {"cls.predictions.bias", "lm_head.bias", "predictions.bias"}
    assert set(info["missing_keys"]) <= (set() if tied else beside_decoder)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert theirs.config.num_labels == ours.config.num_labels
    theirs.save_pretrained(tmp_path / "theirs")
    written, kept = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert same_tensors({key: value for key, value in written.items() if key in kept}, kept)
    assert written.keys() - kept.keys() <= (set() if tied else beside_decoder)
    again = getattr(models, name).from_pretrained(tmp_path / "theirs")
    assert same_tensors(again.state_dict(), ours.state_dict())
    assert dataclasses.replace(again.config, extra={}) == dataclasses.replace(ours.config, extra={})
    assert not again.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    made = model().to(dtype)
    made.save_pretrained(tmp_path)
    assert same_tensors(models.BertForMaskedLM.from_pretrained(tmp_path).state_dict(), made.state_dict())
    wide = models.BertForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert same_tensors(wide.state_dict(), {name: value.float() for name, value in made.state_dict().items()})


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path)
    assert "cls.predictions.decoder.weight" not in stored(tmp_path)
    read = models.BertForMaskedLM.from_pretrained(tmp_path)
    assert read.lm_head.decoder.weight is read.bert.embeddings.word.weight
    assert len(list(read.parameters())) == len(list(made.parameters()))


def test_an_untied_parameter_is_saved(tmp_path: Path) -> None:
    """A checkpoint with only one of the two would be loaded with its values for both."""
    made = model()
    made.lm_head.decoder.weight = torch.nn.Parameter(made.lm_head.decoder.weight.detach().clone())
    made.save_pretrained(tmp_path / "equal")
    with torch.no_grad():
        made.lm_head.decoder.weight.mul_(2)
    with pytest.raises(CheckpointError, match=r"lm_head.decoder.weight: expected the values of bert.embeddings.word"):
        made.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_several_files(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path, shard_bytes=4000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert same_tensors(models.BertForMaskedLM.from_pretrained(tmp_path).state_dict(), made.state_dict())


def test_transformers_reads_several_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = model()
    made.save_pretrained(tmp_path / "ours", shard_bytes=4000)
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert len(list((tmp_path / "theirs").glob("model-*-of-*.safetensors"))) > 2
    assert same_tensors(models.BertForMaskedLM.from_pretrained(tmp_path / "theirs").state_dict(), made.state_dict())


@pytest.mark.parametrize(
    ("before", "after"), [(4000, 10**9), (10**9, 4000), (4000, 4001), (4000, 9000)], ids=lambda size: f"{size}"
)
def test_saving_over_a_checkpoint_replaces_all_of_it(before: int, after: int, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path, shard_bytes=before)
    (tmp_path / "vocab.txt").write_text("mine")
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1)
    made.save_pretrained(tmp_path, shard_bytes=after)
    assert same_tensors(models.BertForMaskedLM.from_pretrained(tmp_path).state_dict(), made.state_dict())
    model().save_pretrained(tmp_path / "new", shard_bytes=after)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "new", "vocab.txt"}


@pytest.mark.parametrize("shard_bytes", [4000, 10**9])
@pytest.mark.parametrize("failing", ["save_file", "json_text"])
def test_a_failed_save_keeps_the_previous_checkpoint(
    shard_bytes: int, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    made.save_pretrained(tmp_path, shard_bytes=shard_bytes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []
    work = getattr(checkpoint_files, failing)

    def full(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == (2 if shard_bytes == 4000 else 1):
            raise OSError(28, "No space left on device")
        return work(*arguments, **options)

    monkeypatch.setattr(checkpoint_files, failing, full)
    with pytest.raises(OSError, match="No space left"):
        model(num_hidden_layers=3).save_pretrained(tmp_path, shard_bytes=shard_bytes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def save_twice(directory: Path, shard_bytes: int, operations: int) -> None:
    """Saves a model of ones, then one of twos, and is killed in the second save after this many file operations."""
    made = model()
    left = itertools.count(operations, -1)

    def killing(work: Any) -> Any:
        def operation(*arguments: Any, **options: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*arguments, **options)

        return operation

    for number in (1, 2):
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(number)
        if number == 2:
            os.replace, Path.unlink = killing(os.replace), killing(Path.unlink)  # type: ignore[method-assign]
            checkpoint_files.save_file = killing(checkpoint_files.save_file)
        made.save_pretrained(directory, shard_bytes=shard_bytes)


@pytest.mark.parametrize("shard_bytes", [10_000, 10**9])
def test_a_process_killed_while_saving_leaves_no_mixed_checkpoint(shard_bytes: int, tmp_path: Path) -> None:
    read = []
    for operations in itertools.count():
        directory = tmp_path / str(operations)
        process = train_runs.start(save_twice, directory, shard_bytes, operations)
        process.join()
        try:
            state = models.BertForMaskedLM.from_pretrained(directory).state_dict()
        except CheckpointError:
            read.append("refused")
        else:
            (number,) = {float(value.flatten()[0]) for value in state.values()}
            read.append("new" if number == 2 else "old")
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    # A single file is written and renamed; then the configuration is renamed and an index removed. Four files are
    # written and their index removed; then they, the configuration and the index are renamed and a single file removed.
    sharded = shard_bytes == 10_000
    expected = ["old"] * 5 + ["refused"] * 6 + ["new"] * 2 if sharded else ["old"] * 2 + ["new"] * 3
    assert read == expected


def test_a_single_file_and_a_sharded_checkpoint_are_refused_unless_the_index_is_stale(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path, shard_bytes=4000)
    made.save_pretrained(tmp_path / "single")
    (tmp_path / "single" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*index\.json, got both"):
        models.BertForMaskedLM.from_pretrained(tmp_path)
    for path in tmp_path.glob("model-*"):  # what transformers leaves of an earlier checkpoint is the index
        path.unlink()
    assert same_tensors(models.BertForMaskedLM.from_pretrained(tmp_path).state_dict(), made.state_dict())


def test_files_of_torch_before_1_6(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert same_tensors(models.BertForMaskedLM.from_pretrained(tmp_path).state_dict(), made.state_dict())
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read: "):
        models.BertForMaskedLM.from_pretrained(tmp_path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="expected tensors by name, got list"):
        models.BertForMaskedLM.from_pretrained(tmp_path)
    torch.save({"weight": Harmful()}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="cannot be read with weights_only") as raised:
        models.BertForMaskedLM.from_pretrained(tmp_path)
    assert "\n" not in str(raised.value)


def test_torch_files_and_old_names(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["bert.embeddings.position_ids"] = torch.arange(11)
    torch.save(old, tmp_path / "pytorch_model.bin")
    assert same_tensors(models.BertForMaskedLM.from_pretrained(tmp_path).state_dict(), made.state_dict())


def test_torch_files_run_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weight": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read"):
        models.BertForMaskedLM.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read"):
        models.BertForMaskedLM.from_pretrained(tmp_path)
    assert "must not run" not in capsys.readouterr().out


# ---- checkpoints of other classes of the family ----------------------------------------------------------------------


def test_a_new_head_is_initialized_and_named(tmp_path: Path) -> None:
    pretrained = model("BertForPreTraining")
    pretrained.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"has no trained head \(classifier\): randomly initialized"):
        made = models.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=7)
    assert made.classifier.weight.shape == (7, 24)
    assert 0.01 < made.classifier.weight.std() < 0.03
    assert not made.classifier.bias.any()
    assert same_tensors(made.bert.state_dict(), pretrained.bert.state_dict())


def test_base_and_heads_load_each_others_checkpoints(tmp_path: Path) -> None:
    base = model("BertModel")
    base.save_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match=r"has no trained head \(lm_head\)"):
        made = models.BertForMaskedLM.from_pretrained(tmp_path / "base")
    assert torch.equal(made.lm_head.norm.weight, torch.ones(24))
    assert made.lm_head.decoder.weight is made.bert.embeddings.word.weight
    made.save_pretrained(tmp_path / "head")
    with pytest.warns(UserWarning, match=r"has no trained head \(pooler\)"):
        again = models.BertModel.from_pretrained(tmp_path / "head")
    assert same_tensors(again.encoder.state_dict(), base.encoder.state_dict())


# ---- broken checkpoints ----------------------------------------------------------------------------------------------

KEY = "bert.encoder.layer.1.attention.self.key.weight"


def damage(directory: Path, change: Any) -> None:
    tensors = stored(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(KEY), rf"{KEY}: missing"),
        (lambda tensors: tensors.pop("cls.predictions.bias"), r"cls\.predictions\.bias: missing"),
        (lambda tensors: tensors.update({"bert.encoder.adapter": torch.ones(1)}), r"bert\.encoder\.adapter: no model"),
        (
            lambda tensors: tensors.update({KEY: torch.ones(24, 23)}),
            rf"{KEY}: expected shape \(24, 24\), got \(24, 23\)",
        ),
        (
            lambda tensors: tensors.update({KEY: torch.ones(24, 24, dtype=torch.int8)}),
            rf"{KEY}: .* got int8",
        ),
        (
            lambda tensors: tensors.update({KEY: torch.ones(24, 24).to(torch.float8_e4m3fn)}),
            rf"{KEY}: expected weights of 16, 32 or 64 bits .*, got float8_e4m3fn",
        ),
    ],
    ids=["missing", "part of a head", "unknown", "shape", "int8", "fp8"],
)
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    damage(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        models.BertForMaskedLM.from_pretrained(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "DistilBertForMaskedLM", "ElectraForPreTraining"])
def test_layers_that_the_configuration_does_not_have_are_named(name: str, tmp_path: Path) -> None:
    model(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    layers = "n_layers" if name.startswith("Distil") else "num_hidden_layers"
    path.write_text(json.dumps({**json.loads(path.read_text()), layers: 1}))
    with pytest.raises(CheckpointError, match=r"layer\.1\..* and 1\d more: expected only .* describes, with 1"):
        getattr(models, name).from_pretrained(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        models.BertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-9.safetensors", "expected the name of a file in its directory"),
        ("../elsewhere/model.safetensors", "expected the name of a file in its directory"),
        ("config.safetensors", "expected this key, which the index lists for this file"),
    ],
)
def test_a_wrong_index_is_named(name: str, message: str, tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path, shard_bytes=4000)
    save_file({"other": torch.ones(1)}, tmp_path / "config.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][KEY] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{KEY}: {message}"):
        models.BertForMaskedLM.from_pretrained(tmp_path)


def test_missing_and_foreign_configurations_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        models.BertModel.from_pretrained(tmp_path)
    models.BertConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected one of model\.safetensors"):
        models.BertModel.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="model_type: expected 'roberta', got 'bert'"):
        models.RobertaModel.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": "relative_key"}))
    with pytest.raises(CheckpointError, match="position_embedding_type: expected 'absolute'"):
        models.BertModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: expected JSON"):
        models.BertModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"config\.json: expected JSON"):
        models.BertModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"size: expected one of tiny, .*, got 'huge'"):
        models.BertConfig.named("huge")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_hidden_layers", -1, "expected a whole number from 1 on, got -1"),
        ("num_hidden_layers", "2", "expected a whole number from 1 on, got '2'"),
        ("hidden_size", 24.0, "expected a whole number from 1 on, got 24.0"),
        ("hidden_size", True, "expected a whole number from 1 on, got True"),
        ("hidden_size", None, "expected a whole number from 1 on, got None"),
        ("vocab_size", [31], r"expected a whole number from 1 on, got \[31\]"),
        ("num_labels", 0, "expected a whole number from 1 on, got 0"),
        ("layer_norm_eps", "1e-12", "expected a number from 0 on, got '1e-12'"),
        ("layer_norm_eps", float("nan"), "expected a number from 0 on, got nan"),
        ("hidden_dropout_prob", 1.5, r"expected a number in \[0, 1\], got 1.5"),
        ("classifier_dropout", -0.1, r"expected a number in \[0, 1\] or null, got -0.1"),
        ("initializer_range", float("inf"), "expected a number from 0 on, got inf"),
        ("hidden_act", 3, "expected a text, got 3"),
        ("tie_word_embeddings", "yes", "expected true or false, got 'yes'"),
        ("pad_token_id", 0.5, "expected a whole number or null, got 0.5"),
        ("id2label", 5, "expected an object with a label for each number, got 5"),
        ("id2label", {"x": "good"}, "expected an object with a label for each number, got {'x': 'good'}"),
    ],
)
def test_wrong_values_of_a_configuration_are_named(field: str, value: Any, expected: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {field}: {expected}"):
        models.BertForMaskedLM.from_pretrained(tmp_path)
    if field != "id2label":
        with pytest.raises(ValueError, match=f"BertConfig: {field}: {expected}"):
            models.BertForMaskedLM(models.BertConfig(**{**SIZES, field: value}))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("pad_token_id", 31, "padding_idx: expected a token id below 31, got 31"),
        ("num_attention_heads", 5, "expected"),
        ("hidden_act", "swish9", "expected"),
    ],
)
def test_a_configuration_of_no_model_is_named(field: str, value: Any, expected: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{expected}"):
        models.BertForMaskedLM.from_pretrained(tmp_path)


def test_a_list_of_end_tokens_and_missing_ids_are_fine() -> None:
    models.GPT2Config(eos_token_id=[1, 2], pad_token_id=None).check()
    with pytest.raises(ValueError, match=r"GPT2Config: eos_token_id: expected a whole number, .* got \['a'\]"):
        models.GPT2Config(eos_token_id=["a"]).check()  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "field"),
    [("BertModel", "pad_token_id"), ("GPT2Model", "eos_token_id"), ("ModernBertModel", "local_rope_theta")],
)
def test_a_field_without_a_value_is_not_read_back_as_its_default(name: str, field: str, tmp_path: Path) -> None:
    kept = config_of(models, name, {**(GPT_SIZES if "GPT" in name else SIZES), field: None})
    kept.save_pretrained(tmp_path)
    assert getattr(type(kept).from_pretrained(tmp_path), field) is None
    assert "problem_type" not in kept.to_dict()  # it has none by default


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("GPT2DoubleHeadsModel", "summary_activation", "relu"),
        ("ModernBertForMaskedLM", "classifier_activation", "mish"),
        ("ModernBertForTokenClassification", "classifier_activation", "mish"),
    ],
)
def test_activations_that_are_not_supported_are_named(name: str, field: str, value: str, tmp_path: Path) -> None:
    sizes = GPT_SIZES if "GPT" in name else {**SIZES, "pad_token_id": 0}
    config = config_of(models, name, sizes)
    model = getattr(models, name)(config)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=f"config.json: .*activation: expected .*, got '{value}'"):
        type(model).from_pretrained(tmp_path)
