"""Images: fine-tuning on the shipped sample by the command, predictions, preprocessing, and files that cannot be
read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import models, tasks
from fasttfm.cli.main import main
from fasttfm.data import shipped_task
from fasttfm.data.images import ImageExample, ImageFormat, as_pixels, images_of, read_images
from fasttfm.data.lines import DataError
from fasttfm.tasks.class_weights import balanced_weights
from fasttfm.tasks.finetuning import prepare, save
from fasttfm.tasks.images import image_language

pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = models.ViTConfig.named("mini", num_hidden_layers=2)
    models.ViTModel(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def run(vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "out"
    call = ["finetune", "--task", "image", "--model", vit, "--output", output, "--epochs", 5, "--learning-rate", 3e-3]
    assert main([str(word) for word in (*call, "--device", "cpu", "--quiet", "--class-weights", "balanced")]) == 0
    return output


def test_the_shipped_sample_is_learnt(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["dev"]["accuracy"] > metrics["majority"]["accuracy"] + 0.15, metrics
    for name in ("predictions.tsv", "log.csv", "curves.png", "confusion.png", "config.json"):
        assert (run / name).stat().st_size > 0
    assert not (run / "tokenizer.json").exists()
    assert json.loads((run / "config.json").read_text())["id2label"]["5"] == "triangle"


def test_transformers_makes_the_same_predictions(run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(run).eval()
    predictor = tasks.load(run, device="cpu")
    examples = read_images(shipped_task("image")["dev"])[:8]
    predictions = predictor(examples)
    # transformers' processor resizes the uint8 image; these have the model's size already.
    grey = np.stack([np.repeat(example.pixels(), 3, axis=-1) for example in examples])
    processor = transformers.AutoImageProcessor.from_pretrained(run, backend="pil")
    inputs = processor(images=list(grey), return_tensors="pt")
    torch.testing.assert_close(inputs["pixel_values"], predictor.task.language.images.batch(examples))
    with torch.no_grad():
        shares = theirs(**inputs).logits.softmax(-1)
    for result, expected in zip(predictions, shares, strict=True):
        assert result.label == theirs.config.id2label[int(expected.argmax())]
        assert list(result.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-4)


def test_predictions_of_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="it writes and decodes images")
    dev = read_images(shipped_task("image")["dev"])[:6]
    for number, example in enumerate(dev):
        folder = tmp_path / "pictures" / str(example.label)
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(example.pixels()[..., 0]).save(folder / f"{number}.png")
    sources: dict[Any, int] = {shipped_task("image")["dev"]: 150, tmp_path / "pictures": 6}
    one = next((tmp_path / "pictures").rglob("*.png"))
    (tmp_path / "list.txt").write_text(f"{one}\n{one}\n")
    (tmp_path / "list.jsonl").write_text(json.dumps({"image": str(one), "label": one.parent.name}) + "\n")
    np.save(tmp_path / "plain.npy", np.stack([example.pixels() for example in dev]))
    sources |= {one: 1, tmp_path / "list.txt": 2, tmp_path / "list.jsonl": 1, tmp_path / "plain.npy": 6}
    for source, count in sources.items():
        output = tmp_path / "found.jsonl"
        call = ("predict", "--model", run, "--data", source, "--output", output, "--overwrite", "--quiet")
        assert main([*map(str, call), "--device", "cpu"]) == 0
        records = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(records) == count
        assert records[0].keys() >= {"image", "label", "probability", "probabilities"}
        assert ("scores" in capsys.readouterr().out) == (
            source not in (one, tmp_path / "list.txt", tmp_path / "plain.npy")
        )
    plain = tasks.load(run, device="cpu")
    assert plain(dev[0].pixels()) == plain(one if one.parent.name == dev[0].label else dev[0])
    assert plain([dev[0].pixels()])[0] == plain({"image": dev[0].pixels()})


# ---- preprocessing ---------------------------------------------------------------------------------------------------


def test_images_are_resized_as_by_pillow() -> None:
    """Within one of 256 levels, because Pillow rounds its weights."""
    image = pytest.importorskip("PIL.Image", reason="it resizes")
    picture = np.random.default_rng(0).integers(0, 256, (37, 50, 3), dtype=np.uint8)
    for bicubic, resample in ((False, image.BILINEAR), (True, image.BICUBIC)):
        resized = ImageFormat((24, 20), bicubic=bicubic)(picture)
        expected = np.asarray(image.fromarray(picture).resize((20, 24), resample)).transpose(2, 0, 1)
        assert resized.shape == (3, 24, 20)
        assert np.abs((resized.numpy() * 0.5 + 0.5) * 255 - expected).max() < 1.01
    grey = ImageFormat((24, 20), 1, (0.0,), (1.0,))(picture)
    expected = np.asarray(image.fromarray(picture).convert("L").resize((20, 24), image.BILINEAR))
    assert np.abs(grey.numpy()[0] * 255 - expected).max() < 2.01  # two roundings
    white = np.full((2, 2, 1), 255, np.uint8)
    white.flags.writeable = False  # as Pillow's arrays
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ImageFormat((2, 2))(white), torch.ones(3, 2, 2))


def test_a_processor_of_transformers_is_read(vit: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    values = {
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.1, 0.2, 0.3],
        "resample": 3,
        "size": {"height": 28, "width": 28},
    }
    transformers.ViTImageProcessorPil(**values).save_pretrained(tmp_path)
    config, family = models.ViTConfig.from_pretrained(vit), models.vit.FAMILY
    form = image_language(tmp_path, family, config).images
    assert (form.mean, form.std, form.bicubic, form.size) == ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3), True, (28, 28))
    written = tmp_path / "preprocessor_config.json"
    written.write_text(json.dumps({**values, "resample": 0}))
    with pytest.raises(models.CheckpointError, match=r"resample: expected one of \[2, 3\], got 0"):
        image_language(tmp_path, family, config)


class Pairs:
    """A data set with the interface of torchvision's."""

    classes = ("night", "day")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if number == 2:
            return np.zeros((5, 4), np.uint8), 0
        return torch.full((3, 5, 4), float(number)), number


def test_data_sets_of_pairs() -> None:
    examples = images_of(Pairs())
    assert [(example.label, example.pixels().shape, example.pixels().max()) for example in examples] == [
        ("night", (5, 4, 3), 0),
        ("day", (5, 4, 3), 255),
        ("night", (5, 4, 1), 0),
    ]


def test_data_sets_of_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision", reason="its data sets are read where it is installed")
    fake = torchvision.datasets.FakeData(2, (3, 8, 8), 2)
    assert [example.pixels().shape for example in images_of(fake)] == [(8, 8, 3)] * 2


def test_a_single_label_is_reported(vit: Path) -> None:
    train = [ImageExample(f"{number}", Path("nowhere.png"), "a") for number in range(4)]
    with pytest.warns(UserWarning, match="all 4 training examples have the label 'a'"):
        prepare("image", vit, train)


def test_class_weights_decode_nothing(vit: Path) -> None:
    train = [ImageExample(f"{number}", Path("nowhere.png"), "ab"[number // 3]) for number in range(4)]
    _, task = prepare("image", vit, train)
    assert balanced_weights(task, task.features(train)) == pytest.approx([2 / 3, 2.0])


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_unusable_files_are_named(tmp_path: Path) -> None:
    def written(**arrays: Any) -> Path:
        np.savez(tmp_path / "a.npz", **arrays)
        return tmp_path / "a.npz"

    images = np.zeros((3, 4, 4), np.uint8)
    cases = [
        (lambda: tmp_path / "a.txt", "expected a folder, or a name that ends in .npz"),
        (lambda: tmp_path / "none.png", "expected an image, got no such file"),
        (lambda: tmp_path / "none.npz", "a.*readable file, got No such file"),
        (lambda: written(pixels=images), "expected an array images, got pixels"),
        (lambda: written(images=images, labels=np.zeros(2)), r"labels of shape \(3,\), one for each image, got"),
        (lambda: written(images=images, labels=np.array([0, 1, 2]), names=np.array(["a", "b"])), "labels from 0 to 1"),
        (lambda: written(images=images[0]), r"\[count, height, width\] or .*, got shape \(4, 4\)"),
        (lambda: written(images=images.astype(np.int64) + 300), "uint8 pixels, or numbers from 0 to 1, got int64"),
        (lambda: written(images=images[:, :0]), r"images of at least one pixel, got shape \(3, 0, 4\)"),
        (lambda: written(images=images, labels=np.array([0, 1, np.nan])), "expected labels, got NaN"),
        (lambda: written(images=np.array([None])), "arrays as NumPy saves them"),
        (lambda: tmp_path, "expected images"),
    ]
    for path, sentence in cases:
        with pytest.raises(DataError, match=sentence):
            read_images(path())
    pytest.importorskip("PIL", reason="it decodes")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"broken.png: expected an image that Pillow decodes"):
        read_images(tmp_path / "broken.png")[0].pixels()


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, int])
def test_labels_of_data_sets_may_be_arrays(kind: Any) -> None:
    class Labelled(Pairs):
        def __getitem__(self, number: int) -> tuple[Any, Any]:
            return super().__getitem__(number)[0], kind(self.labels[number])

        labels = (0, 1, 1)

    assert [example.label for example in images_of(Labelled())] == ["night", "day", "day"]
    for wrong in (-1, 2):
        Labelled.labels = (0, 1, wrong)
        with pytest.raises(DataError, match=f"image 2: expected a label from 0 to 1, .*, got {wrong}"):
            images_of(Labelled())


def test_labels_of_bytes_and_no_images(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, images=np.zeros((2, 4, 4), np.uint8), labels=np.array([b"caf\xc3\xa9", b"bar"]))
    assert [example.label for example in read_images(path)] == ["café", "bar"]
    np.savez(path, images=np.zeros((0, 4, 4)))
    assert read_images(path) == []


def test_images_of_16_bits_keep_their_levels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="it decodes")
    levels = np.arange(0, 2**16, 257, dtype=np.uint16).reshape(16, 16)
    image.fromarray(levels).save(tmp_path / "a.png")
    assert np.array_equal(read_images(tmp_path / "a.png")[0].pixels()[..., 0], levels >> 8)
    for name, pixels, got in (("b", levels.astype(np.int32), "32 bits"), ("c", levels / 2.0**16, "fractions")):
        image.fromarray(pixels.astype(np.float32) if name == "c" else pixels).save(tmp_path / f"{name}.tif")
        with pytest.raises(DataError, match=f"{name}.tif: expected an image that Pillow decodes, got pixels of {got}"):
            read_images(tmp_path / f"{name}.tif")[0].pixels()
        with image.open(tmp_path / f"{name}.tif") as opened, pytest.raises(DataError, match="an image of 8 or 16 bits"):
            as_pixels(opened, "x")


def test_hidden_files_are_skipped_and_other_files_are_counted(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="it writes images")
    for name in ("cat/a", "cat/deeper/b", "dog/c", "d", ".ipynb_checkpoints/e", "dog/._c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (3, 3)).save(tmp_path / f"{name}.png")
    with pytest.warns(UserWarning, match="2 images that are not in a label's own folder are left out"):
        examples = read_images(tmp_path)
    assert [(Path(example.name).name, example.label) for example in examples] == [("a.png", "cat"), ("c.png", "dog")]


def test_the_command_rejects_wrong_arguments(vit: Path, bert_directory: Path, tmp_path: Path, capsys: Any) -> None:
    def said(*words: Any) -> str:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in ("finetune", "--output", tmp_path / "run", "--device", "cpu", *words)])
        assert stop.value.code == 2
        return str(capsys.readouterr().err)

    assert "image: expected a model of vit; bert has no head for it" in said(
        "--task", "image", "--model", bert_directory
    )
    assert "expected a model that reads text, got ViT" in said("--task", "classify", "--model", vit)
    length = said("--task", "image", "--model", vit, "--max-length", 64)
    assert "max_length: expected with a task that reads text, got 64 with image" in length
    assert "values: expected with the tasks" in said("--task", "image", "--model", vit, "--values")
    assert not (tmp_path / "run").exists()


def test_folders_of_images_train(vit: Path, tmp_path: Path) -> None:
    """train and val with a folder for each label, as in ImageNet, and a single such folder."""
    image = pytest.importorskip("PIL.Image", reason="it writes images")
    for part, count in (("train", 6), ("val", 2)):
        for label in ("dark", "light"):
            folder = tmp_path / "set" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (9, 7), (number + 200 * (label == "light"),) * 3).save(folder / f"{number}.jpg")
    examples = tasks.read_examples("image", tmp_path / "set")
    assert (len(examples.train), len(examples.dev)) == (12, 4)
    assert {example.label for example in examples.dev} == {"dark", "light"}
    alone = tasks.read_examples("image", tmp_path / "set" / "train")
    assert len(alone.train) + len(alone.dev) == 12
    model, task = prepare("image", vit, examples.train)
    assert model(**task.batch(task.features(examples.train[:2])).inputs()).logits.shape == (2, 2)
    save(model, task, tmp_path / "model")
    assert tasks.load(tmp_path / "model", device="cpu")(examples.dev[0].name).label in ("dark", "light")


def test_shipped_images_are_those_that_the_tool_makes() -> None:
    import importlib.util

    path = Path(__file__).parents[2] / "tools" / "make_shapes.py"
    spec = importlib.util.spec_from_file_location("make_shapes", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for part, file in shipped_task("image").items():
        with np.load(file) as shipped:
            for name, array in tool.make(part).items():
                assert np.array_equal(shipped[name], array), name
