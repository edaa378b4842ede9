"""ERNIE's pre-training: the noise of alignments, batches, and the commands from a graph to a fine-tuned model."""

from __future__ import annotations

import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import addresses, save_bert

from fasttfm import models
from fasttfm.cli.main import main
from fasttfm.data import DataError, Masking, Tokenizer, train_tokenizer
from fasttfm.data.knowledge import MentionExample, Span, read_mentions
from fasttfm.data.knowledge_batches import EntityNoise, KnowledgeStream
from fasttfm.data.texts import shipped_knowledge
from fasttfm.models.ernie_knowledge import KnowledgePretraining
from fasttfm.train import Trainer

TEXTS = [
    MentionExample("Trade with Spain grew. That with Cuba did not.", [Span(11, 16, "Spain"), Span(33, 37, "Cuba")]),
    MentionExample("Mexico is near. It is a neighbor.", [Span(0, 6, "Mexico")]),
    MentionExample("Peru has no second sentence", [Span(0, 4, "Peru")]),
]
KNOWN = {"Spain": 3, "Cuba": 1, "Mexico": 7}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("wordpiece", addresses(20), 900)


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_fractions_of_noise() -> None:
    entities = np.where(np.arange(40_000) % 2 == 0, np.arange(40_000) % 11, -1)
    noisy = EntityNoise().apply(entities, np.random.default_rng(0))
    aligned = entities >= 0
    assert (noisy[~aligned] == -1).all()
    masked = (noisy[aligned] == -1).mean()
    kept = (noisy[aligned] == entities[aligned]).mean()
    # Of 20,000 alignments, four standard deviations.
    assert abs(masked - 0.15) < 4 * np.sqrt(0.15 * 0.85 / 20_000)
    assert abs(kept - 0.8) < 4 * np.sqrt(0.8 * 0.2 / 20_000)
    assert set(noisy[aligned]) == {-1, *range(11)}


def test_a_single_entity_is_not_replaced() -> None:
    entities = np.array([4, -1, 4, 4])
    assert EntityNoise(replaced=1.0, masked=0.0).apply(entities, np.random.default_rng(0)).tolist() == [4, -1, 4, 4]
    assert EntityNoise(replaced=0.0, masked=1.0).apply(entities, np.random.default_rng(0)).tolist() == [-1] * 4
    with pytest.raises(ValueError, match="EntityNoise: expected fractions of at least 0 with a sum of at most 1"):
        EntityNoise(0.6, 0.5)


# ---- batches ---------------------------------------------------------------------------------------------------------


def stream(tokenizer: Tokenizer, **options: Any) -> KnowledgeStream:
    return KnowledgeStream(TEXTS, tokenizer, KNOWN, **{"max_length": 32, "tokens_per_batch": 64, **options})


def test_sequences_and_their_entities(tokenizer: Tokenizer) -> None:
    quiet = {"masking": Masking(0.0), "noise": EntityNoise(0.0, 0.0)}
    labels = set()
    for batch in islice(stream(tokenizer, **quiet), 12):
        aligned, targets = batch.entities, batch.entity_targets
        rows = torch.full((batch.tokens,), -1)
        rows[aligned.positions] = aligned.ids
        assert torch.equal(targets.candidates[targets.labels], rows[targets.positions])
        assert set(rows[rows >= 0].tolist()) <= {1, 3, 7}
        names = {tokenizer.token(int(id)) for id in batch.input_ids[rows == 7]}
        assert names <= {tokenizer.token(tokenizer.encode("Mexico")[0])}
        for low, high in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            text = tokenizer.decode(batch.input_ids[low:high], skip_special_tokens=False)
            assert text.startswith("[CLS] ")
            assert text.count("[SEP]") == 2
            assert high - low <= 32
        labels |= set(batch.sentence_labels.tolist())
        assert batch.predictions == 0
    assert labels == {0, 1}


def test_the_seed_determines_the_result(tokenizer: Tokenizer) -> None:
    first, again, other = (next(iter(stream(tokenizer, seed=seed))) for seed in (0, 0, 1))
    assert torch.equal(first.input_ids, again.input_ids)
    assert torch.equal(first.entities.positions, again.entities.positions)
    assert len(first.input_ids) != len(other.input_ids) or not torch.equal(first.input_ids, other.input_ids)
    assert first.predictions > 0


def test_invalid_streams(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="expected 8 <= max_length <= tokens_per_batch, got 65 and 64"):
        stream(tokenizer, max_length=65)
    with pytest.raises(DataError, match="expected two texts or more, with two sentences, got fewer"):
        KnowledgeStream(TEXTS[2:], tokenizer, KNOWN)


def test_noise_changes_the_inputs_and_not_the_labels(tokenizer: Tokenizer) -> None:
    batch = next(iter(stream(tokenizer, noise=EntityNoise(0.0, 1.0))))
    assert (batch.entities.ids == -1).all()  # only the first tokens
    assert len(batch.entity_targets.labels) > 0
    moved = batch.to("cpu")
    assert torch.equal(moved.entity_targets.candidates, batch.entity_targets.candidates)


# ---- training --------------------------------------------------------------------------------------------------------


def test_the_objective_is_the_loss_of_the_model(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    config = models.ErnieKnowledgeConfig.named("tiny", hidden_size=32, intermediate_size=64, num_entities=8)
    config.vocab_size, config.hidden_dropout_prob, config.attention_probs_dropout_prob = tokenizer.vocab_size, 0.0, 0.0
    model = models.ErnieKnowledgeForPreTraining(config)
    model.set_entities([str(number) for number in range(8)], torch.randn(8, 32))
    batch = next(iter(stream(tokenizer)))
    objective = KnowledgePretraining(model)
    means = [each / count for each, count in zip(objective(batch), objective.counts(batch), strict=True)]
    output = model(
        batch.input_ids,
        token_type_ids=batch.token_type_ids,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        entities=batch.entities,
        labels=batch.labels,
        positions=batch.positions,
        next_sentence_label=batch.sentence_labels,
        entity_labels=batch.entity_targets,
    )
    torch.testing.assert_close(sum(means), output.loss)
    assert objective.flops(batch) > 0


def test_from_a_graph_to_a_fine_tuned_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The three commands, on the shipped data."""
    graph, ernie, tuned = (str(tmp_path / name) for name in ("kg", "ernie", "tuned"))
    quiet = ["--quiet", "--output"]
    assert main(["transe", "--width", "16", "--epochs", "20", *quiet, graph]) == 0
    options = ["--steps", "8", "--tokens-per-step", "1024", "--max-length", "64", "--learning-rate", "2e-3"]
    options += ["--vocabulary", "800", "--device", "cpu"]
    assert main(["pretrain-knowledge", "--entities", graph, *options, *quiet, ernie]) == 0
    found = json.loads((tmp_path / "ernie" / "metrics.json").read_text())["validation"]
    assert set(found) == {"loss", "masked_lm", "next_sentence", "entities"}
    assert found["masked_lm"] < np.log(800) + 0.5
    options = ["--epochs", "1", "--max-length", "48", "--device", "cpu"]
    assert main(["finetune", "--task", "relation", "--model", ernie, *options, *quiet, tuned]) == 0
    model = models.ErnieKnowledgeForSequenceClassification.from_pretrained(tuned)
    assert len(model.entity_names) == 126
    assert model.config.entity_embedding_size == 16
    for arguments, status, message in (
        (["--entities", str(tmp_path / "nowhere")], 1, "entity2id.txt: expected a readable file"),
        (["--entities", graph, "--output", ernie], 2, "--output: expected a new or empty directory"),
        (["--entities", graph, "--steps", "0"], 2, "steps: expected a number from 1 on, got 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["pretrain-knowledge", "--quiet", *arguments])
        assert stopped.value.code == status
        assert message in capsys.readouterr().err


def test_plain_text_is_linked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rivers = ["서울\thas\t한강", "평양\thas\t대동강", "부산\thas\t낙동강", "서울\tnear\t부산"]
    (tmp_path / "rivers.tsv").write_text("\n".join(rivers) + "\n")
    text = "서울에는 한강이 흐른다. 한강은 길다.\n\n부산의 강은 낙동강이다. 강물은 바다로 간다.\n\n"
    text += "큰물은 깊다. 낙동강도 깊다.\n\n"
    (tmp_path / "texts.txt").write_text(text * 4)
    (tmp_path / "names.tsv").write_text("큰물\t한강\n")
    kg = str(tmp_path / "kg")
    graph = ["--data", str(tmp_path / "rivers.tsv"), "--width", "8", "--epochs", "2"]
    assert main(["transe", *graph, "--quiet", "--output", kg]) == 0
    options = [
        "--steps",
        "2",
        "--tokens-per-step",
        "128",
        "--max-length",
        "32",
        "--vocabulary",
        "200",
        "--device",
        "cpu",
    ]
    files = ["--entities", kg, "--data", str(tmp_path / "texts.txt")]
    for more, mentions in (([], 24), (["--names", str(tmp_path / "names.tsv")], 28)):
        output = str(tmp_path / f"ernie{mentions}")
        assert main(["pretrain-knowledge", *files, *more, *options, "--output", output]) == 0
        assert f"12 texts, 12 with mentions of entities, {mentions} mentions" in capsys.readouterr().out
    (tmp_path / "names.tsv").write_text("Han\tHan River\n")
    with pytest.raises(SystemExit):
        main(["pretrain-knowledge", *files, *more, *options])
    assert "names.tsv: expected names of the 6 entities of the graph, got 'Han River'" in capsys.readouterr().err


def test_an_interrupted_run_continues_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, whole, part = (str(tmp_path / name) for name in ("kg", "whole", "part"))
    assert main(["transe", "--width", "8", "--epochs", "1", "--quiet", "--output", graph]) == 0
    call = ["pretrain-knowledge", "--entities", graph, "--steps", "5", "--tokens-per-step", "256", "--max-length", "32"]
    call += ["--vocabulary", "400", "--device", "cpu", "--quiet", "--checkpoint-every", "2", "--output"]
    assert main([*call, whole]) == 0
    assert not list((tmp_path / "whole").glob("checkpoint-*"))
    step = Trainer.step

    def stopped_at(number: int, trainer: Trainer, batches: Any) -> Any:
        if trainer.completed == number:
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer, batches)

    monkeypatch.setattr(Trainer, "step", lambda trainer, batches: stopped_at(2, trainer, batches))
    with pytest.raises(SystemExit) as stopped:
        main([*call, part])
    assert stopped.value.code == 1
    expected = f"stopped by a signal after step 3; {part}/checkpoint-000003 was written; --resume continues from there"
    assert expected in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "step", step)
    models.ErnieKnowledgeForPreTraining.from_pretrained(part)  # a model as well
    with pytest.raises(SystemExit):
        main([*call, part, "--resume", "--seed", "1"])
    assert "is of a run with other settings: seed was 0, is 1" in capsys.readouterr().err
    assert main([*call, part, "--resume"]) == 0
    for name in ("model.safetensors", "metrics.json"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    steps = [line.split(",")[0] for line in (tmp_path / "part" / "log.csv").read_text().splitlines()]
    assert steps == ["step", "2", "3", "4", "5"]
    with pytest.raises(SystemExit):
        main([*call, part, "--resume"])
    assert f"{part}: expected a checkpoint to resume from, got none" in capsys.readouterr().err


def test_a_run_starts_from_a_bert(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_bert(tokenizer, tmp_path)
    with pytest.warns(UserWarning, match="next_sentence"):
        model = models.ErnieKnowledgeForPreTraining.from_bert(
            tmp_path, layer_types=["norm"], entity_hidden_size=16, entity_num_attention_heads=2
        )
    with pytest.warns(UserWarning, match="pooler"):
        bert = models.BertModel.from_pretrained(tmp_path)
    assert torch.equal(model.bert.encoder.layers[0].qkv.weight, bert.encoder.layers[0].qkv.weight)
    assert torch.equal(model.lm_head.decoder.weight, bert.embeddings.word.weight)
    assert model.bert.encoder.layers[0].entity_up.weight.shape == (128, 16)
    assert len(read_mentions(shipped_knowledge("mentions"))) == 865
