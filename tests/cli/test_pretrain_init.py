"""``fasttfm pretrain --init``, ``--objective`` and ``--resume``: initial weights, objectives, and resumed runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import SIZES, run_of, settings_of

from fasttfm import models
from fasttfm.cli.main import main
from fasttfm.train.checkpoints import read_state
from fasttfm.train.logs import read_rows
from fasttfm.train.pretrain import RunError, pretrain
from fasttfm.train.pretrain_parts import masking
from fasttfm.train.run_directory import SETTINGS


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttfm.train.pretrain.write_curves", lambda *_: None)


@pytest.fixture(scope="module")
def trained(corpus: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fasttfm.train.pretrain.write_curves", lambda *_: None)
        for family in ("bert", "electra"):
            pretrain(settings_of(corpus, family, steps=2), run_of(folder / family))
    return {family: folder / family for family in ("bert", "electra")}


def arguments(corpus: dict[str, Path], output: Path, *more: str) -> list[str]:
    small = ["--max-length", "64", "--tokens-per-step", "128", "--steps", "2", "--held-out", "0.1", "--quiet"]
    return ["pretrain", "--device", "cpu", "--data", str(corpus["data"]), "--output", str(output), *small, *more]


def fails(call: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(call)
    assert stopped.value.code
    return capsys.readouterr().err


def weights(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_a_run_starts_from_another(corpus: dict[str, Path], trained: dict[str, Path], tmp_path: Path) -> None:
    """With a learning rate of 0 it ends with the same parameters; the tokenizer and the objective are those of the
    first run, and the tokenizer keeps the model's maximum length."""
    call = arguments(corpus, tmp_path / "run", "--init", str(trained["bert"]), "--learning-rate", "0")
    assert main(call) == 0
    before, after = weights(trained["bert"] / "latest"), weights(tmp_path / "run" / "latest")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "run" / "latest" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 512
    assert "validation_next_sentence" in read_rows(tmp_path / "run" / "log.csv")[0]


def test_a_resumed_run_does_not_need_the_checkpoint_that_it_started_from(
    corpus: dict[str, Path], trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained["bert"] / "latest", tmp_path / "first")
    assert main(arguments(corpus, tmp_path / "run", "--init", str(tmp_path / "first"))) == 0
    shutil.rmtree(tmp_path / "first")
    assert main(["pretrain", "--resume", "--more-steps", "1", "--output", str(tmp_path / "run"), "--quiet"]) == 0
    assert (tmp_path / "run" / "checkpoint-000003").is_dir()
    assert "randomly initialized" not in capsys.readouterr().err


def test_masked_lm_only_drops_the_other_head(corpus: dict[str, Path], trained: dict[str, Path], tmp_path: Path) -> None:
    call = arguments(corpus, tmp_path / "run", "--init", str(trained["bert"] / "latest"), "--objective", "mlm")
    assert main([*call, "--spans", "--masking", "0.2"]) == 0
    config = json.loads((tmp_path / "run" / "latest" / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    # A run from such a checkpoint has its objective.
    assert main(arguments(corpus, tmp_path / "next", "--init", str(tmp_path / "run"))) == 0
    rows = read_rows(tmp_path / "next" / "log.csv")
    assert "validation_next_sentence" not in rows[0]
    loss, perplexity = float(rows[-1]["validation_masked_lm"]), float(rows[-1]["validation_perplexity"])
    assert perplexity == pytest.approx(2.718281828**loss, rel=1e-3)


def test_a_checkpoint_of_transformers_with_its_own_tokenizer_files(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's vocab.json and merges.txt; a vocabulary of bytes, without merges."""
    transformers = pytest.importorskip("transformers")
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path / "gpt2"
    names = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    config = transformers.GPT2Config(
        vocab_size=len(names), n_positions=128, **SIZES["gpt2"], bos_token_id=256, eos_token_id=256
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    assert main(arguments(corpus, tmp_path / "run", "--init", str(folder))) == 0
    ours = models.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "latest")
    assert ours.config.vocab_size == 257
    assert "wte" in " ".join(weights(tmp_path / "run" / "latest"))
    sentence = "max_length: expected up to 128, for which"
    assert sentence in fails(arguments(corpus, tmp_path / "x", "--init", str(folder), "--max-length", "256"), capsys)
    assert not (tmp_path / "x").exists()


def test_electra_starts_from_both_models(
    corpus: dict[str, Path], trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, tmp_path / "run", "--init", str(trained["electra"]), "--learning-rate", "0")) == 0
    for part in ("generator", "discriminator"):
        before, after = (weights(run / "latest" / part) for run in (trained["electra"], tmp_path / "run"))
        assert all(torch.equal(before[name], after[name]) for name in before)
    single = trained["electra"] / "latest" / "discriminator"
    message = fails(arguments(corpus, tmp_path / "x", "--init", str(single)), capsys)
    assert "expected a folder with ELECTRA's 'generator' and 'discriminator', got" in message


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["bert", "--objective", "clm"], "objective: expected mlm+nsp or mlm+sop or mlm for BERT, got 'clm'"),
        (["albert", "--objective", "rtd"], "objective: expected mlm+sop or mlm+nsp or mlm for ALBERT, got 'rtd'"),
        (["gpt3", "--objective", "mlm"], "objective: expected clm for GPT-3, got 'mlm'"),
        (["gpt2", "--init", "BERT"], "--init: expected a checkpoint of gpt2, got one of bert"),
        (["--init", "BERT", "--size", "base"], "--size: expected without --init, whose checkpoint has a size"),
        (["--init", "BERT", "--cased"], "--cased: expected without --init, whose tokenizer is used"),
        (["--init", "/nowhere/model"], "/nowhere/model"),
        (["--mask-share", "1.5"], "mask_share: expected a share of the predicted tokens in [0, 1], got 1.5"),
        (["--mask-share", "0.8", "--random-share", "0.3"], "mask_share + random_share: expected at most 1"),
        (["--vocabulary-kind", "words"], "vocabulary_kind: expected one of wordpiece, bpe, unigram, got 'words'"),
        (["--more-steps", "5"], "--more-steps: expected a number above 0, with --resume, got 5"),
    ],
)
def test_impossible_requests_are_reported(
    more: list[str],
    sentence: str,
    corpus: dict[str, Path],
    trained: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = [str(trained["bert"]) if option == "BERT" else option for option in more]
    assert sentence in fails(arguments(corpus, tmp_path / "run", *more), capsys)
    assert not (tmp_path / "run").exists()


def test_fractions_of_masks(corpus: dict[str, Path]) -> None:
    """ELECTRA's generator reads [MASK] wherever it predicts; the others 80% [MASK], 10% random tokens."""

    def shares(family: str, **changes: Any) -> tuple[float, float]:
        rates = masking(settings_of(corpus, family, **changes))
        assert rates is not None
        return rates.mask_share, rates.random_share

    assert shares("electra") == (1.0, 0.0)
    assert shares("electra", objective="mlm") == (0.8, 0.1)
    assert shares("bert") == (0.8, 0.1)
    assert shares("bert", mask_share=1.0) == (1.0, 0.0)
    assert shares("bert", mask_share=0.5, random_share=0.25) == (0.5, 0.25)
    assert masking(settings_of(corpus, "gpt3")) is None
    spans = masking(settings_of(corpus, "bert", spans=True))
    assert spans is not None
    assert (spans.spans, spans.whole_word, spans.ngram) == (True, True, 10)


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_a_run_resumes_with_its_own_settings(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from another working directory. More steps must be requested; they are then a setting of the run."""
    monkeypatch.chdir(corpus["data"].parent)
    small = [f"{name}={value}" for name, value in SIZES["bert"].items()]
    begin = ["--data", "texts.txt", "--tokenizer", "wordpiece", "--seed", "3", "--set", *small]
    run = tmp_path / "run"
    monkeypatch.setattr("fasttfm.cli.pretrain._default_device", lambda: "cpu")
    options = ["--max-length", "64", "--tokens-per-step", "128", "--held-out", "0.1", "--quiet"]
    assert main(["pretrain", "--output", str(run), *begin, *options, "--steps", "3", "--checkpoint-every", "2"]) == 0
    shutil.rmtree(run / "checkpoint-000003")
    monkeypatch.chdir(tmp_path)
    resume = ["pretrain", "--resume", "--output", str(run), "--quiet"]
    assert main(resume) == 0
    assert (run / "checkpoint-000003").is_dir()
    assert "seed was 3, is 4" in fails([*resume, "--seed", "4"], capsys)
    assert "--steps: expected with --resume the 3 steps of the run" in fails([*resume, "--steps", "5"], capsys)
    assert main([*resume, "--more-steps", "2"]) == 0
    assert read_state(run / "latest")["settings"]["steps"] == 5
    assert [row["step"] for row in read_rows(run / "log.csv")][-1] == "5"
    assert main(resume) == 0  # nothing is left to do
    assert json.loads((run / SETTINGS).read_text())["settings"]["schedule"]["steps"] == 5


def test_a_folder_without_a_run_is_not_resumed(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(["pretrain", "--resume", "--output", str(tmp_path / "mistyped")], capsys)
    assert "mistyped: expected a run to resume, got nothing there" in message
    assert not (tmp_path / "mistyped").exists()
    (tmp_path / "other").mkdir()
    message = fails(["pretrain", "--resume", "--output", str(tmp_path / "other")], capsys)
    assert "other: expected a run to resume, got a directory without one" in message
    with pytest.raises(RunError, match="mistyped: expected a run to resume, got nothing there"):
        pretrain(settings_of(corpus, steps=2), run_of(tmp_path / "mistyped", resume=True))
    (tmp_path / "other" / SETTINGS).write_text("{}")
    message = fails(["pretrain", "--resume", "--output", str(tmp_path / "other")], capsys)
    assert f"{SETTINGS}: expected the settings of a run, got 'settings'" in message
