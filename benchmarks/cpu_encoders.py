"""Text to vectors on a CPU: sessions next to transformers, ONNX Runtime, OpenVINO, CTranslate2 and others.

    python benchmarks/cpu_encoders.py --model minilm --threads 2 --out benchmarks/results
    python benchmarks/cpu_encoders.py --directory all-MiniLM-L6-v2 --threads 1 --peers onnxruntime openvino

All contenders run in one process and take turns; each reads texts and returns the mean of the last states of each
text. Peers get batches of 32 texts sorted by length and padded to the longest. The parts are one text of 3, of 16 and
of 128 tokens, 32 sentences, and 1,000 sentences of the shipped texts. Wall time and the process's processor time are
medians over rounds; the cosine is the smallest one to transformers' vectors in fp32, and the overlap of 1,000 texts is
the share of each text's ten nearest that stay. Weights are random without --directory: the accuracy of 8 bits shows
only with trained ones.

Rows go to ``<machine>-cpu_encoders.csv``, where those of the same model and number of threads are replaced. Packages
that are not installed are left out, with a message.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {},
}
PEERS = ("transformers", "compile", "sentence-transformers", "onnxruntime", "openvino", "ctranslate2")
PARTS = {"1 text, 3 tokens": 3, "1 text, 16 tokens": 16, "1 text, 128 tokens": 128, "32 texts": 32, "1000 texts": 1000}
BATCH = 32
NEIGHBOURS = 10
Encode = Callable[[list[str]], Any]  # texts to vectors [texts, C]


class Inputs:
    """Texts as padded batches of ids, in the order of the texts' lengths."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.enable_truncation(512)
        self.tokenizer.no_padding()

    def vectors(self, texts: list[str], run: Callable[[Any, Any], Any]) -> Any:
        """``run`` gets ids and mask, int64 [B, S], and returns states [B, S, C]."""
        import numpy as np

        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        vectors: list[Any] = [None] * len(rows)
        for first in range(0, len(rows), BATCH):
            part = order[first : first + BATCH]
            longest = len(rows[part[0]])
            ids = np.zeros((len(part), longest), np.int64)
            mask = np.zeros((len(part), longest), np.int64)
            for line, index in enumerate(part):
                ids[line, : len(rows[index])] = rows[index]
                mask[line, : len(rows[index])] = 1
            states = run(ids, mask)
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            for line, index in enumerate(part):
                vectors[index] = means[line]
        return np.stack(vectors)


# ---- contenders: functions of the model's directory, the inputs and the number of threads ----------------------------


def sessions(directory: Path, inputs: Inputs, threads: int) -> dict[str, Encode]:
    from fasttfm.inference import EmbedSettings, Session
    from fasttfm.inference.precision import candidates

    forms: dict[str, dict[str, Any]] = {"session float32": {}, "session int8": {"precision": "int8"}}
    forms |= {f"session {each.name}": {"dtype": each.dtype} for each in candidates() if not each.int8}
    calls = {}
    for name, options in forms.items():
        session = Session(str(directory), settings=EmbedSettings(pooling="mean"), device="cpu", **options)
        calls[name] = session.encode
    return calls


def transformers_models(directory: Path, inputs: Inputs, threads: int, *, compiled: bool = False) -> dict[str, Encode]:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(directory).eval()
    call = torch.compile(model, dynamic=True) if compiled else model

    @torch.inference_mode()
    def run(ids: Any, mask: Any) -> Any:
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return call(**inputs).last_hidden_state.numpy()

    name = "transformers + compile" if compiled else "transformers"
    return {name: lambda texts: inputs.vectors(texts, run)}


def compiled_models(directory: Path, inputs: Inputs, threads: int) -> dict[str, Encode]:
    return transformers_models(directory, inputs, threads, compiled=True)


def sentence_transformers_models(directory: Path, inputs: Inputs, threads: int) -> dict[str, Encode]:
    from sentence_transformers import SentenceTransformer, models

    import fasttfm

    calls = {}
    for name in ("sentence-transformers", "sentence-transformers + fasttfm.patch"):
        word = models.Transformer(str(directory))
        model = SentenceTransformer(modules=[word, models.Pooling(word.get_word_embedding_dimension())], device="cpu")
        if name.endswith("patch"):
            fasttfm.patch(model)
        calls[name] = lambda texts, model=model: model.encode(texts, batch_size=BATCH, show_progress_bar=False)
    return calls


def _exported(directory: Path) -> Path:
    """transformers' model as an ONNX file with dynamic sizes."""
    import torch
    import transformers

    path = directory / "model.onnx"
    if not path.exists():
        model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
        names = ("input_ids", "attention_mask", "token_type_ids")
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
        sizes = {name: {0: batch, 1: length} for name in names}
        program = torch.onnx.export(
            model,
            kwargs={name: torch.ones(2, 8, dtype=torch.int64) for name in names},
            dynamic_shapes=sizes,
            dynamo=True,
            verbose=False,
        )
        program.save(str(path))
    return path


def _feed(ids: Any, mask: Any) -> dict[str, Any]:
    import numpy as np

    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def onnxruntime_models(directory: Path, inputs: Inputs, threads: int) -> dict[str, Encode]:
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    path = _exported(directory)
    quantized = directory / "model-int8.onnx"
    quantize_dynamic(path, quantized, per_channel=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    calls = {}
    for name, file in (("onnxruntime fp32", path), ("onnxruntime int8", quantized)):
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        output = session.get_outputs()[0].name

        def run(ids: Any, mask: Any, session: Any = session, output: str = output) -> Any:
            return session.run([output], _feed(ids, mask))[0]

        calls[name] = lambda texts, run=run: inputs.vectors(texts, run)
    return calls


def openvino_models(directory: Path, inputs: Inputs, threads: int) -> dict[str, Encode]:
    import openvino

    core = openvino.Core()
    model = core.read_model(_exported(directory))
    options = {"INFERENCE_NUM_THREADS": str(threads), "PERFORMANCE_HINT": "LATENCY"}
    forms = {"openvino f32": (model, {"INFERENCE_PRECISION_HINT": "f32"}), "openvino default": (model, {})}
    try:
        forms["openvino int8 (NNCF)"] = (_quantized_by_nncf(core, directory, inputs), {})
    except ImportError as error:
        print(f"openvino int8 is left out: {error}", flush=True)
    calls = {}
    for name, (form, more) in forms.items():
        compiled = core.compile_model(form, "CPU", {**options, **more})
        request = compiled.create_infer_request()

        def run(ids: Any, mask: Any, request: Any = request) -> Any:
            return request.infer(_feed(ids, mask))[0]

        calls[name] = lambda texts, run=run: inputs.vectors(texts, run)
    return calls


def _quantized_by_nncf(core: Any, directory: Path, inputs: Inputs) -> Any:
    import nncf
    import numpy as np

    rows = [encoding.ids for encoding in inputs.tokenizer.encode_batch(sentences(100, seed=1))]
    samples = [_feed(np.array([row]), np.ones((1, len(row)), np.int64)) for row in rows]
    model = core.read_model(_exported(directory))
    return nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))


def ctranslate2_models(directory: Path, inputs: Inputs, threads: int) -> dict[str, Encode]:
    import ctranslate2
    import numpy as np

    source, converted = directory / "ctranslate2-source", directory / "ctranslate2"
    source.mkdir(exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, source)
    config = json.loads((directory / "config.json").read_text())
    # The converter reads a field that transformers 5 no longer has.
    (source / "config.json").write_text(json.dumps({**config, "position_embedding_type": "absolute"}))
    ctranslate2.converters.TransformersConverter(str(source)).convert(str(converted), force=True)
    calls = {}
    for kind in ("float32", "int8"):
        encoder = ctranslate2.Encoder(str(converted), device="cpu", compute_type=kind, intra_threads=threads)

        def run(ids: Any, mask: Any, encoder: Any = encoder) -> Any:
            rows = [row[:length].tolist() for row, length in zip(ids, mask.sum(1), strict=True)]
            return np.array(encoder.forward_batch(rows).last_hidden_state)

        calls[f"ctranslate2 {'fp32' if kind == 'float32' else kind}"] = lambda texts, run=run: inputs.vectors(
            texts, run
        )
    return calls


CONTENDERS: dict[str, Callable[[Path, Inputs, int], dict[str, Encode]]] = {
    "transformers": transformers_models,
    "compile": compiled_models,
    "sentence-transformers": sentence_transformers_models,
    "onnxruntime": onnxruntime_models,
    "openvino": openvino_models,
    "ctranslate2": ctranslate2_models,
}


# ---- texts and measurements ------------------------------------------------------------------------------------------


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of the shipped texts, in random order."""
    import random

    from fasttfm import data
    from fasttfm.data.sentences import sentence_starts

    kept: list[str] = []
    for text in data.read_documents(data.shipped_corpus() / "state-of-the-union.txt.gz"):
        bounds = [*sentence_starts(text), len(text)]
        pieces = (" ".join(text[first:end].split()) for first, end in itertools.pairwise(bounds))
        kept += [piece for piece in pieces if 4 <= len(piece.split()) <= 45]
        if len(kept) > 20 * count:
            break
    return random.Random(seed).sample(kept, count)


def texts_of(part: str, inputs: Inputs) -> list[str]:
    """The texts of a part; a single one has exactly its number of tokens."""
    if not part.startswith("1 text,"):
        return sentences(PARTS[part])
    words = " ".join(sentences(40, seed=2)).split()
    text, tokens = "", 2
    for word in words:
        longer = f"{text} {word}".strip()
        tokens = len(inputs.tokenizer.encode(longer).ids)
        if tokens <= PARTS[part]:
            text = longer
        if tokens >= PARTS[part]:
            break
    return [text]


Times = list[tuple[float, float]]


def measured(calls: Mapping[str, Encode], texts: list[str], seconds: float) -> tuple[dict[str, Any], dict[str, Times]]:
    """The vectors of each call, and its wall and processor seconds in rounds of about ``seconds`` for all contenders:
    five rounds, or three where one call of each takes longer."""
    vectors, repeats = {}, {}
    begun = time.perf_counter()
    for name, call in calls.items():
        if len(texts) <= BATCH:
            call(texts)
        start = time.perf_counter()
        vectors[name] = call(texts)
        repeats[name] = max(1, int(seconds / len(calls) / 5 / (time.perf_counter() - start)))
    rounds = 5 if time.perf_counter() - begun < seconds else 3
    times: dict[str, Times] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(repeats[name]):
                call(texts)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            times[name].append((wall / repeats[name], processor / repeats[name]))
    return vectors, times


def smallest_cosine(result: Any, expected: Any) -> float:
    import numpy as np

    one, other = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (result, expected))
    return float((one * other).sum(1).min())


def neighbour_overlap(result: Any, expected: Any) -> float:
    """The share of the ten nearest of the other texts of each text, by ``expected``, that are so by ``result``."""
    import numpy as np

    nearest = []
    for vectors in (result, expected):
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        scores = unit @ unit.T
        np.fill_diagonal(scores, -np.inf)
        nearest.append(np.argpartition(-scores, NEIGHBOURS, axis=1)[:, :NEIGHBOURS])
    shared = [len(set(one) & set(other)) for one, other in zip(*nearest, strict=True)]
    return float(np.mean(shared)) / NEIGHBOURS


def random_model(name: str, folder: Path) -> Path:
    """A BERT of a shape in ``SIZES`` with random weights, and a tokenizer of the shipped texts."""
    import torch

    from fasttfm import data, models

    documents = data.read_documents(data.shipped_corpus() / "state-of-the-union.txt.gz")
    tokenizer = data.train_tokenizer("wordpiece", list(documents)[:100], 8000)
    torch.manual_seed(0)
    models.BertModel(models.BertConfig(vocab_size=tokenizer.vocab_size, **SIZES[name])).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a file, instead of earlier ones of the same model and number of threads."""
    same = {(row["model"], str(row["threads"])) for row in rows}
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if (row["model"], row["threads"]) not in same]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SIZES), default="minilm", help="a shape with random weights")
    parser.add_argument("--directory", type=Path, help="a BERT of transformers, instead of --model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=tuple(PARTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each part")
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    settings = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)  # before torch is imported

    import torch

    from fasttfm.bench.timing import device_name, file_stem

    torch.set_num_threads(settings.threads)
    device = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if settings.directory is None:
            directory = random_model(settings.model, Path(folder))
        else:  # peers write their files next to the model's
            directory = Path(shutil.copytree(settings.directory, Path(folder) / settings.directory.name))
        inputs = Inputs(directory)
        calls: dict[str, Encode] = {}
        for make in (sessions, transformers_models, *(CONTENDERS[peer] for peer in settings.peers)):
            try:
                calls |= make(directory, inputs, settings.threads)
            except ImportError as error:
                print(f"{make.__name__} are left out: {error}", flush=True)
        for part in settings.parts:
            texts = texts_of(part, inputs)
            vectors, times = measured(calls, texts, settings.seconds)
            cosines = {name: smallest_cosine(found, vectors["transformers"]) for name, found in vectors.items()}
            for name, samples in times.items():
                wall, processor = (statistics.median(column) for column in zip(*samples, strict=True))
                row = {"part": part, "contender": name, "threads": settings.threads}
                row |= {"ms": round(1e3 * wall, 3), "processor_ms": round(1e3 * processor, 3)}
                row |= {"texts_per_second": round(len(texts) / wall, 1), "cosine": round(cosines[name], 6)}
                row |= {"overlap": ""}
                if len(texts) > 10 * NEIGHBOURS:
                    row["overlap"] = round(neighbour_overlap(vectors[name], vectors["transformers"]), 4)
                row |= {"model": settings.model if settings.directory is None else directory.name}
                row |= {"device": device_name(device), "versions": _versions()}
                rows.append(row)
                numbers = f"{row['ms']:10.3f} ms {row['processor_ms']:10.3f} ms processor"
                rate = f"{row['texts_per_second']:9.1f}/s"
                print(f"{part:20} {name:40} {numbers} {rate}  {row['cosine']:.5f} {row['overlap']}", flush=True)
    if settings.out is not None:
        path = settings.out / f"{file_stem(device)}-cpu_encoders.csv"
        write(path, rows)
        print(path)


def _versions() -> str:
    names = ("fasttfm", "torch", "transformers", "sentence-transformers", "onnxruntime", "openvino", "ctranslate2")
    return ", ".join(f"{name} {version(name)}" for name in names if importlib.util.find_spec(name.replace("-", "_")))


if __name__ == "__main__":
    main()
