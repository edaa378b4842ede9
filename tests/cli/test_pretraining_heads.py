"""``fasttfm predict`` with the heads of pre-trained models: next sentence, sentence order, replaced tokens."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm import models, tasks
from fasttfm.cli.main import main
from fasttfm.data import Tokenizer
from fasttfm.models.checkpoint_files import CheckpointError
from fasttfm.tasks.pretraining_heads import ReplacedExample, ReplacedTokensTask
from fasttfm.tasks.replaced_page import marked

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
FIRST, SECOND = "The war is over.", "We have peace with all nations."


def saved(kind: str, config: str, tokenizer: Tokenizer, directory: Path, **changes: Any) -> tuple[Path, Any]:
    """A run with a model with random parameters, and the model."""
    torch.manual_seed(1)
    fields = {"vocab_size": tokenizer.vocab_size, **SIZES, **changes}
    model = getattr(models, kind)(getattr(models, config)(**fields)).eval()
    model.save_pretrained(directory / "latest")
    tokenizer.save(directory / "latest")
    return directory, model


@pytest.fixture(scope="module")
def electra(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("electra")
    return saved("ElectraForJointPreTraining", "ElectraConfig", wordpiece, folder, embedding_size=32)


def predicted(*options: Any) -> int:
    return main([str(word) for word in ("predict", "--device", "cpu", "--quiet", *options)])


@pytest.mark.parametrize(
    ("kind", "config", "logits", "labels"),
    [
        ("BertForPreTraining", "BertConfig", "seq_relationship_logits", ["IsNext", "NotNext"]),
        ("AlbertForPreTraining", "AlbertConfig", "sop_logits", ["in_order", "swapped"]),
    ],
)
def test_pairs_of_sentences(
    kind: str,
    config: str,
    logits: str,
    labels: list[str],
    wordpiece: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, model = saved(kind, config, wordpiece, tmp_path / "run", **({"embedding_size": 32} if "A" in kind else {}))
    special, texts = wordpiece.special, [wordpiece.encode(text) for text in (FIRST, SECOND)]

    def expected(first: list[int], second: list[int]) -> list[float]:
        ids = [special.cls, *first, special.sep, *second, special.sep]
        segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        with torch.no_grad():
            output = model(torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
        probabilities: list[float] = getattr(output, logits)[0].softmax(-1).tolist()
        return probabilities

    lines = [{"text": FIRST, "text_pair": SECOND, "label": labels[0]}, {"text": SECOND, "text_pair": FIRST}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "found.jsonl"
    assert predicted("--model", run, "--data", tmp_path / "pairs.jsonl", "--output", output) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    both = [expected(*texts), expected(*reversed(texts))]
    assert both[0][0] != pytest.approx(both[1][0], abs=1e-3)  # the order of the texts counts
    for record, values in zip(records, both, strict=True):
        assert list(record["probabilities"]) == labels
        assert list(record["probabilities"].values()) == pytest.approx(values, abs=1e-4)
        assert record["label"] == labels[values.index(max(values))]
    right = float(records[0]["label"] == labels[0])
    assert f"scores     accuracy {right:.3f}" in capsys.readouterr().out
    assert predicted("--model", run, "--text", FIRST, SECOND) == 0
    again = json.loads(capsys.readouterr().out)["probabilities"]
    assert again == pytest.approx(records[0]["probabilities"], abs=1e-5)  # in another batch


def test_replaced_tokens_of_texts(
    electra: tuple[Path, Any], wordpiece: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, joint = electra
    original, text = "The war of the nations is the peace.", "The war of the peace is the peace."
    ids = wordpiece.encode(text)
    with torch.no_grad():
        around = torch.tensor([[wordpiece.special.cls, *ids, wordpiece.special.sep]])
        values = joint.discriminator(around).logits[0, 1:-1].sigmoid().tolist()
    assert min(values) < 0.5 < max(values)  # so that some tokens are marked
    (tmp_path / "a.tsv").write_text(f"sentence1\tsentence2\n{text}\t{original}\n")
    output = tmp_path / "found.jsonl"
    assert predicted("--model", run, "--data", tmp_path / "a.tsv", "--output", output) == 0
    record = json.loads(output.read_text())
    assert record["probabilities"] == pytest.approx(values, abs=1e-4)
    assert record["tokens"] == ["The", "war", "of", "the", "peace", "is", "the", "peace", "."]
    assert [text[at : at + len(token)] for at, token in zip(record["starts"], record["tokens"], strict=True)] == record[
        "tokens"
    ]
    assert record["gold"] == [False] * 4 + [True] + [False] * 4
    right = sum(replaced == gold for replaced, gold in zip(record["replaced"], record["gold"], strict=True)) / 9
    assert f"scores     accuracy {right:.3f}, precision" in capsys.readouterr().out
    assert predicted("--model", run, "--text", text) == 0
    line = capsys.readouterr().out.rstrip("\n")
    assert line == marked(record)
    assert re.sub(r"\[(\w+|\.) 0\.\d\d\]", r"\1", line) == text
    assert len(re.findall(r"\[\S+ (0\.\d\d|1\.00)\]", line)) == sum(record["replaced"])
    assert predicted("--model", run, "--text", text, original, "--output", tmp_path / "found.csv") == 0
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["token"] for row in rows] == record["tokens"]
    assert [row["sentence"] for row in rows] == ["1"] * 9
    assert predicted("--model", run, "--text", text, original, "--output", tmp_path / "found.html") == 0
    page = (tmp_path / "found.html").read_text()
    spans = re.findall(r'<span( class="[^"]*")? style="[^"]*" title="([^"]*)%">([^<]*)</span>', page.split("scale")[-1])
    spans = spans[5:]  # those of the scale
    assert [span[2] for span in spans] == record["tokens"]
    assert [float(span[1]) for span in spans] == pytest.approx([100 * value for value in values], abs=0.06)
    assert ["marked" in span[0] for span in spans] == record["replaced"]
    assert ["wrong" in span[0] for span in spans] == [
        replaced != gold for replaced, gold in zip(record["replaced"], record["gold"], strict=True)
    ]
    assert page.rstrip().endswith("</html>")


def test_long_texts_are_read_in_pieces_and_special_characters_stay(
    electra: tuple[Path, Any], wordpiece: Tokenizer, tmp_path: Path
) -> None:
    run, joint = electra
    text = "war & peace <b>" * 20
    predictor = tasks.load(run, device="cpu")
    prediction: Any = predictor(text)
    ids = wordpiece.encode(text)
    assert len(prediction.tokens) == len(prediction.probabilities) == len(ids) > 100
    piece = torch.tensor([[wordpiece.special.cls, *ids[30:60], wordpiece.special.sep]])
    with torch.no_grad():
        values = joint.discriminator(piece).logits[0, 1:-1].sigmoid().tolist()
    assert prediction.probabilities[30:60] == pytest.approx(values, abs=1e-4)
    assert predicted("--model", run, "--text", text, "--output", tmp_path / "a.html") == 0
    body = (tmp_path / "a.html").read_text().split('class="text"')[1]
    assert "<b>" not in body
    assert body.count("&lt;") == body.count("&amp;") == 20


def test_the_generator_of_the_run_replaces_tokens(
    electra: tuple[Path, Any], wordpiece: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, joint = electra
    text = "The war of the nations is the peace, and peace is the war of all the nations."
    ids = wordpiece.encode(text)
    options = ("--model", run, "--text", text, "--replace", 0.3)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert predicted(*options, "--seed", seed, "--output", tmp_path / f"{name}.jsonl") == 0
    first, again, other = (json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in "abc")
    assert first == again != other
    assert first["original"] == text
    assert len(first["tokens"]) == len(ids)
    assert 0 < sum(first["gold"]) <= round(0.3 * len(ids))
    originals = [wordpiece.decode([id]) for id in ids]
    for token, original, replaced in zip(first["tokens"], originals, first["gold"], strict=True):
        assert (token.lower() != original) == replaced
    spans = [(start, start + len(token)) for start, token in zip(first["starts"], first["tokens"], strict=True)]
    assert [first["text"][begin:end] for begin, end in spans] == first["tokens"]
    changed = [
        wordpiece.backend.token_to_id(token) if replaced else id
        for id, token, replaced in zip(ids, first["tokens"], first["gold"], strict=True)
    ]
    with torch.no_grad():
        around = torch.tensor([[wordpiece.special.cls, *changed, wordpiece.special.sep]])
        values = joint.discriminator(around).logits[0, 1:-1].sigmoid().tolist()
    assert first["probabilities"] == pytest.approx(values, abs=1e-4)
    capsys.readouterr()
    for wrong, expected in ((["--replace", "2"], "up to 1, got 2.0"), (["--replace", "x"], "invalid float value")):
        with pytest.raises(SystemExit):
            predicted("--model", run, "--text", text, *wrong)
        assert expected in capsys.readouterr().err


def test_scores_of_replaced_tokens(wordpiece: Tokenizer) -> None:
    task: Any = object.__new__(ReplacedTokensTask)
    examples = [ReplacedExample("a", [True, False, False]), ReplacedExample("b", [True])]
    scores = task.scores(examples, [[True, True, False], [False]])
    # Of four tokens two are right; of two that are marked and of two that are replaced, one.
    assert scores == {"accuracy": 0.5, "precision": 0.5, "recall": 0.5, "f1": 0.5}


def test_a_head_that_the_checkpoint_does_not_name(
    wordpiece: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The released BERTs name BertForMaskedLM and have the head for next sentences too."""
    run, _ = saved("BertForPreTraining", "BertConfig", wordpiece, tmp_path / "run")
    path = run / "latest" / "config.json"
    path.write_text(path.read_text().replace("BertForPreTraining", "BertForMaskedLM"))
    with pytest.raises(CheckpointError, match="got BertForMaskedLM, which fasttfm fill-mask and fasttfm score run"):
        tasks.load(run, device="cpu")
    assert predicted("--model", run, "--task", "next-sentence", "--text", FIRST, SECOND) == 0
    assert "IsNext" in capsys.readouterr().out
    saved("BertForMaskedLM", "BertConfig", wordpiece, tmp_path / "without")
    with pytest.raises(CheckpointError, match="expected a model with a trained head"):
        tasks.load(tmp_path / "without", task="next-sentence", device="cpu")


@pytest.mark.parametrize(("objective", "label"), [("mlm+sop", "swapped"), ("mlm+nsp", "NotNext"), (None, "NotNext")])
def test_the_run_says_which_pairs_it_was_trained_on(
    objective: str | None, label: str, wordpiece: Tokenizer, tmp_path: Path
) -> None:
    """As ``fasttfm pretrain bert --objective mlm+sop``, which has the architecture of next sentences."""
    saved("BertForPreTraining", "BertConfig", wordpiece, tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps({"settings": {"family": "bert", "objective": objective}}))
    assert tasks.load(tmp_path, device="cpu").task.labels[1] == label


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--text", FIRST], "expected two texts with a tab between them"),
        (["--task", "replaced-tokens", "--text", "a"], "replaced-tokens, got BERT, which has next-sentence"),
        (["--replace", "0.1", "--text", "a", "b"], "--replace: expected with replaced-tokens, got next-sentence"),
        (["--format", "html", "--text", "a", "b"], "--format: expected csv or jsonl for the task next-sentence"),
        ([], "--data: expected a file of examples, or the texts of one with --text, got neither"),
        (["--data", "a.txt", "--text", "a"], "got both"),
    ],
)
def test_wrong_arguments(
    options: list[str],
    expected: str,
    wordpiece: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, _ = saved("BertForPreTraining", "BertConfig", wordpiece, tmp_path_factory.mktemp("run"))
    with pytest.raises(SystemExit):
        predicted("--model", run, *options)
    assert expected in capsys.readouterr().err


def test_originals_with_other_tokens_are_refused(
    electra: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("the war\tthe war is over\n")
    with pytest.raises(SystemExit):
        predicted("--model", electra[0], "--data", tmp_path / "a.txt")
    assert "a.txt, line 1: replaced-tokens: expected an original of 2 tokens, as its text has, got 4" in (
        capsys.readouterr().err
    )
