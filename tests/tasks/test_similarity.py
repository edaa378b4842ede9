"""The similarity task: files, losses, scores, gradient caching, and the saved model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from fasttfm.cli.main import main
from fasttfm.cli.options import sentence
from fasttfm.data.lines import DataError
from fasttfm.data.pair_files import SimilarityExample, read_similarity
from fasttfm.data.texts import shipped_task
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare
from fasttfm.tasks.rates import Rates
from fasttfm.tasks.similarity import retrieval_scores
from fasttfm.train import cached_loss
from fasttfm.train.distributed import World

TRIPLETS = [
    SimilarityExample("the whale swam in the sea", "a whale is in the water", ("the senate met", "a vote")),
    SimilarityExample("the congress voted", "the senate met and voted"),
    SimilarityExample("ships and sails", "a ship with sails", ("taxes are due",)),
    SimilarityExample("taxes and debts", "the debts of the nation", ("a ship",)),
]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("anchor\tpositive\na\tb\n", SimilarityExample("a", "b")),
        ("query\tdocument\tnegative\na\tb\tc\n", SimilarityExample("a", "b", ("c",))),
        ("anchor\tpositive\tnegative_1\tnegative_2\na\tb\tc\td\n", SimilarityExample("a", "b", ("c", "d"))),
        (
            "anchor\tpositive\tnegative\tpositive_score\tnegative_score\na\tb\tc\t9\t-1.5\n",
            SimilarityExample("a", "b", ("c",), None, (9.0, -1.5)),
        ),
        ("anchor\tpositive\tnegative\na\tb\t\n", SimilarityExample("a", "b")),
        ("index\tsentence1\tsentence2\tscore\n0\ta\tb\t2.5\n", SimilarityExample("a", "b", (), 2.5)),
    ],
)
def test_files(text: str, expected: SimilarityExample, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text(text)
    assert read_similarity(tmp_path / "pairs.tsv") == [expected]


def test_other_formats(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "score": 3}\n')
    assert read_similarity(tmp_path / "pairs.jsonl") == [SimilarityExample("a", "b", (), 3.0)]
    (tmp_path / "pairs.csv").write_text('anchor,positive\n"a, b",c\n')
    assert read_similarity(tmp_path / "pairs.csv") == [SimilarityExample("a, b", "c")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header line and examples, got an empty file"),
        ("anchor\tother\na\tb\n", "pairs.tsv, line 1: expected the columns 'anchor' and 'positive'"),
        ("anchor\tpositive\n", "expected examples after the header line, got none"),
        ("anchor\tpositive\na\n", "pairs.tsv, line 2: expected 2 columns, got 1"),
        ("anchor\tpositive\tnegative\tpositive_score\na\tb\tc\t1\n", "line 1: expected a column of scores for each"),
        ("anchor\tpositive\tpositive_score\na\tb\t1\n", "line 1: expected a column of scores for each negative"),
        ("sentence1\tsentence2\tscore\na\tb\tmuch\n", "pairs.tsv, line 2: expected a number as the score of a pair"),
    ],
)
def test_files_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_similarity(tmp_path / "pairs.tsv")


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_retrieval_scores() -> None:
    keys = np.eye(4, dtype=np.float32)
    assert retrieval_scores(keys, keys) == {"accuracy": 1.0, "mrr": 1.0}
    queries = keys.copy()
    queries[3] = [0.5, 0.4, 0.3, 0.2]  # its own key comes last
    scores = retrieval_scores(queries, keys)
    assert scores == {"accuracy": 0.75, "mrr": pytest.approx((3 + 1 / 4) / 4)}
    same = np.ones((1000, 1), dtype=np.float32)
    assert retrieval_scores(same, same) == {"accuracy": 0.0, "mrr": 0.0}


# ---- losses ----------------------------------------------------------------------------------------------------------


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_gradient_caching_is_the_whole_batch(scored: bool, bert_directory: Path) -> None:
    examples = TRIPLETS
    if scored:
        examples = [
            SimilarityExample(example.first, example.second, (), float(n))
            for n, example in enumerate(TRIPLETS, start=1)
        ]
    model, task = prepare("similarity", bert_directory, examples)
    features = task.features(examples)
    model.eval()
    whole = task.loss(model, task.batch(features))
    expected = gradients(model, whole)
    assert expected
    for task.mini_batch in (1, 3):
        loss = task.loss(model, task.batch(features))
        torch.testing.assert_close(loss.detach(), whole.detach())
        for name, gradient in gradients(model, loss).items():
            torch.testing.assert_close(gradient, expected[name])
    with torch.no_grad():
        assert not task.loss(model, task.batch(features)).requires_grad


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_losses_are_their_formulas(bert_directory: Path) -> None:
    model, task = prepare("similarity", bert_directory, TRIPLETS, dimensions=(64, 16))
    batch = task.batch(task.features(TRIPLETS))
    vectors = task.logits(model, batch).detach()
    first, second, negative = [0, 4, 6, 9], [1, 5, 7, 10], [2, 3, 8, 11]
    parts = []
    for width in (64, 16):
        unit = torch.nn.functional.normalize(vectors[:, :width], dim=-1)
        scores = unit[first] @ unit[second + negative].T / 0.05
        parts.append(torch.nn.functional.cross_entropy(scores, torch.arange(4)))
    torch.testing.assert_close(task.loss(model, batch).detach(), sum(parts) / 2)
    owners = [0, 0, 2, 3]
    taught = [
        SimilarityExample(example.first, example.second, example.negatives, None, (7.0, *range(len(example.negatives))))
        for example in TRIPLETS
    ]
    model, task = prepare("similarity", bert_directory, taught, temperature=0.1)
    batch = task.batch(task.features(taught))
    vectors = task.logits(model, batch).detach()
    queries = vectors[first][owners]
    margins = ((queries * (vectors[second][owners] - vectors[negative])).sum(1)) / 0.1
    expected = (margins - torch.tensor([7.0, 6.0, 7.0, 7.0])).square().mean()
    torch.testing.assert_close(task.loss(model, batch).detach(), expected)


def share(rank: int, directory: str, path: str) -> None:
    """A process's part of a batch, and the gradients of all."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for examples in (TRIPLETS[:3], TRIPLETS[:1]):  # two and one; one, and a filler
        model, task = prepare("similarity", Path(directory), examples, dimensions=(64, 32))
        model.eval()
        features = task.features(examples)
        whole = gradients(model, task.loss(model, task.batch(features)) * len(examples))
        task.processes = 2
        rank_features = features[rank::2]
        batch = task.batch(rank_features or features[:1])
        batch.count = float(len(rank_features))
        (loss,) = task.losses(model, batch)
        gradients_of_rank = gradients(model, loss * batch.count)
        for name in whole:
            torch.distributed.all_reduce(gradients_of_rank[name])
            torch.testing.assert_close(gradients_of_rank[name], whole[name], atol=1e-5, rtol=1e-4)
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_negatives_are_those_of_all_processes(bert_directory: Path, tmp_path: Path) -> None:
    run_ranks(share, str(bert_directory), str(tmp_path / "store"))


def train(directory: str, world: World) -> dict[str, Tensor]:
    examples = [SimilarityExample(f"text {n}", f"other {n % 3}", ("taxes",) * (n % 2)) for n in range(7)]
    torch.manual_seed(0)  # of the pooler, which the checkpoint lacks
    model, task = prepare("similarity", Path(directory), examples)
    settings = FinetuneSettings(rates=Rates(1e-3), epochs=2, batch_size=3, warmup=0.0)
    FineTuning(model, task, examples, settings, world=world).run(lambda results: None)
    return model.state_dict()


def train_share(rank: int, directory: str, path: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trained = train(directory, World(torch.device("cpu"), rank, 2, "ddp"))
    torch.save(trained, f"{path}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_two_processes_train_as_one(bert_directory: Path, tmp_path: Path) -> None:
    """Batches of three, three and one example: two and one, and one and a filler."""
    run_ranks(train_share, str(bert_directory), str(tmp_path / "store"))
    expected = train(str(bert_directory), World(torch.device("cpu")))
    before = prepare("similarity", bert_directory, TRIPLETS)[0].state_dict()
    for rank in range(2):
        gradients_of_rank = torch.load(tmp_path / f"store.{rank}")
        for name, weight in expected.items():
            # Adam divides by the gradient's size, so sums in another order count most where it is small.
            torch.testing.assert_close(gradients_of_rank[name], weight, atol=2e-4, rtol=1e-3)
    trained = [name for name in before if not name.startswith("pooler")]
    assert max(float((expected[name] - before[name]).abs().max()) for name in trained) > 2e-3


def test_cached_loss_repeats_dropout_and_autocast() -> None:
    layer = torch.nn.Linear(6, 4)
    x = torch.randn(8, 6)
    seen = []

    def encode(part: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(layer(part), 0.5)
        seen.append(y.detach())
        return y

    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cached_loss(encode, x.split(3), lambda vectors: vectors.float().square().sum())
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(seen) == 6
    assert all(torch.equal(one, other) for one, other in zip(seen[:3], seen[3:], strict=True))
    assert seen[3].dtype == torch.bfloat16
    assert layer.weight.grad is not None


def test_a_cached_loss_trains_parameters_of_the_loss() -> None:
    encoder, head, temperature = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), torch.nn.Parameter(torch.tensor(1.3))
    parts = list(torch.randn(12, 8).split(3))
    parameters = (temperature, *head.parameters(), *encoder.parameters())

    def loss(vectors: Tensor) -> Tensor:
        z = head(vectors)
        return torch.nn.functional.cross_entropy(z @ z.t() * temperature, torch.arange(len(z)))

    expected = torch.autograd.grad(3 * loss(torch.cat([encoder(part) for part in parts])), parameters)
    (3 * cached_loss(encoder, parts, loss)).backward()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    encoder.requires_grad_(False)
    cached_loss(encoder, parts, loss).backward()
    torch.testing.assert_close(temperature.grad, expected[0] * 4 / 3)


def test_wrong_arguments(bert_directory: Path) -> None:
    with pytest.raises(ValueError, match="temperature: expected a number above 0, got 0"):
        prepare("similarity", bert_directory, TRIPLETS, temperature=0)
    with pytest.raises(ValueError, match="mini_batch"):
        prepare("similarity", bert_directory, TRIPLETS, mini_batch=0)
    with pytest.raises(ValueError, match="dimensions: expected a number from 1 on, got 0"):
        prepare("similarity", bert_directory, TRIPLETS, dimensions=(0,))
    model, task = prepare("similarity", bert_directory, TRIPLETS, dimensions=(65,))
    with pytest.raises(ValueError, match="dimensions: expected numbers from 1 to 64, got 65"):
        task.loss(model, task.batch(task.features(TRIPLETS)))
    taught = [*TRIPLETS, SimilarityExample("a", "b", ("c",), None, (1.0, 2.0))]
    with pytest.raises(DataError, match="a teacher's scores for all training examples or for none, got 1 of 5"):
        prepare("similarity", bert_directory, taught)
    mixed = [*TRIPLETS, SimilarityExample("a", "b", (), 1.0)]
    with pytest.raises(DataError, match="a score for all training examples or for none, got 1 of 5"):
        prepare("similarity", bert_directory, mixed)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*randomly initialized", "ignore:.*truncated")
def test_the_command_saves_a_sentence_model(
    bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    arguments = ["finetune", "--task", "similarity", "--model", str(bert_directory), "--output", str(output)]
    arguments += ["--epochs", "2", "--learning-rate", "2e-3", "--max-length", "48", "--batch-size", "32"]
    assert main([*arguments, "--mini-batch", "16", "--dimensions", "64,16", "--quiet", "--device", "cpu"]) == 0
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["dev"]["mrr"] > metrics["majority"]["mrr"] + 0.3, metrics
    dev = read_similarity(shipped_task("similarity")["dev"])
    untrained, untrained_task = prepare("similarity", bert_directory, dev, max_length=48)
    expected = untrained_task.scores(dev, predict(untrained, untrained_task, dev))
    assert metrics["untrained"] == pytest.approx(expected)
    printed = capsys.readouterr().out
    assert f"untrained  {sentence(metrics['untrained'])}" in printed
    rows = (output / "predictions.tsv").read_text().splitlines()
    examples = read_similarity(shipped_task("similarity")["dev"])
    assert len(rows) == 1 + len(examples)
    library = pytest.importorskip("sentence_transformers", reason="it opens the folder")
    theirs = library.SentenceTransformer(str(output), device="cpu")
    assert theirs.max_seq_length == 48
    vectors = theirs.encode([example.first for example in examples[:8]])
    model, task = prepare("similarity", output, examples, max_length=48)
    vectors_of_predict = np.stack([pair.first for pair in predict(model, task, examples[:8])])
    np.testing.assert_allclose(vectors, vectors_of_predict, atol=1e-5)
