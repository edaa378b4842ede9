"""Times ``inference.Session``: an encoder's synchronous calls, and sentences from text to vectors.

    python benchmarks/inference.py --out benchmarks/results
    python benchmarks/inference.py --quick --peers eager
    OMP_NUM_THREADS=2 python benchmarks/inference.py --device cpu --out benchmarks/results

Contenders of a case alternate, and each call ends when its result is complete; times are wall-clock medians. Parts:

    encoder    BERT-base on a GPU: a call with ids on the host that ends with results on the host ("session"), the model
               and transformers' with tensors on the device. Batches are 56% full, unless they have one sequence.
    sentences  A model of MiniLM's shape (6 layers of 384 columns, 12 heads) over sentences of 5 to 60 tokens of the
               shipped texts, or of --texts, from text to vectors: the session, and a loop over transformers' model with
               its tokenizer and mean pooling, over texts in random order and sorted by length. On a GPU 4,096 sentences
               in bf16, in batches of 128 and 512 for transformers; on a CPU 2,000 in batches of 32.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_batch_contenders import Batch, encoder, inference_call
from small_batches import PEERS, Bench, write

from fasttfm import data, models
from fasttfm.data.sentences import sentence_starts
from fasttfm.inference import Session

PARTS = ("encoder", "sentences")
SHAPES = ((1, 32), (1, 128), (8, 128), (32, 128), (32, 512), (128, 512))
MINILM = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
LENGTHS = (5, 60)  # tokens of a sentence, including special tokens


# ---- calls of an encoder ---------------------------------------------------------------------------------------------


def encoder_calls(bench: Bench, most_tokens: int) -> None:
    module = bench.model.ours("BertModel").eval()
    names = bench.selected(("fasttfm", "hf eager", "hf reduce-overhead"))
    modules = {name: encoder(name, bench.model) for name in names}
    with Session(module) as session:
        for size, sequence in SHAPES:
            batch = Batch.of(size, sequence, bench.model.vocabulary, bench.device)
            if sum(batch.lengths) > most_tokens:
                continue
            ids = batch.ids.cpu().numpy()
            rows = [row[:length] for row, length in zip(ids, batch.lengths, strict=True)]
            calls: dict[str, Callable[[], object]] = {"session": lambda rows=rows: session.encode(rows)}
            calls |= {name: inference_call(name, call, bench.model, batch) for name, call in modules.items()}
            times = bench.in_turns(calls, rounds=8 if bench.quick else 20, calls_a_round=10, wait=True)
            ratios = {
                name: statistics.median(times[name]) / statistics.median(times["session"])
                for name in names
                if name != "fasttfm"
            }
            note = ", ".join(f"{name} takes {ratio:.2f}x" for name, ratio in ratios.items())
            bench.add("encoder", f"B{size} S{sequence}", times, note)
        counts = session.graph_counts
        print(f"  {counts.captured} graphs captured, {counts.replayed} replays, {counts.evicted} evicted", flush=True)


# ---- sentences -------------------------------------------------------------------------------------------------------


def sentences(bench: Bench, source: Path | None) -> None:
    import transformers

    documents = list(data.read_documents(source or data.shipped_corpus()))
    tokenizer = data.train_tokenizer("wordpiece", documents[:200], 8000)
    texts = chosen(documents, tokenizer, 4096 if bench.on_gpu else 2000)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        models.BertModel(models.BertConfig(vocab_size=tokenizer.vocab_size, **MINILM)).save_pretrained(folder)
        tokenizer.save(folder)
        theirs = transformers.AutoModel.from_pretrained(folder).eval().to(bench.device)
        words = transformers.AutoTokenizer.from_pretrained(folder)
        contenders: dict[str, dict[str, Any]] = {"session": {}}
        if not bench.on_gpu:
            contenders |= {"session bf16": {"dtype": torch.bfloat16}, "session int8": {"precision": "int8"}}
        opened = {name: Session(folder, device=bench.device, **options) for name, options in contenders.items()}
    if bench.on_gpu:
        theirs = theirs.bfloat16()
    calls: dict[str, Callable[[], np.ndarray]] = {
        name: (lambda session=session: session.encode(texts)) for name, session in opened.items()
    }
    for size in (128, 512) if bench.on_gpu else (32,):
        for ordered in (True, False):
            name = f"hf eager, batch {size}, {'sorted' if ordered else 'as they come'}"
            calls[name] = lambda size=size, ordered=ordered: embedded(theirs, words, texts, size, ordered)
    expected = next(call for name, call in calls.items() if name.startswith("hf"))()
    for name in opened:
        cosine = float((normalized(calls[name]()) * normalized(expected)).sum(1).min())
        print(f"  {name}: smallest cosine to transformers {cosine:.6f}", flush=True)
    times = bench.in_turns(calls, rounds=3 if bench.quick else 7, calls_a_round=1, warmup=1, wait=True)
    ours = statistics.median(times["session"])
    rates = {name: len(texts) / statistics.median(seconds) for name, seconds in times.items()}
    note = ", ".join(
        f"{name}: {rate:,.0f} sentences/s ({rates['session'] / rate:.2f}x)" for name, rate in rates.items()
    )
    print(f"  {note}", flush=True)
    bench.add("sentences", f"{len(texts)} sentences", times, f"session: {len(texts) / ours:,.0f} sentences/s")
    for row in bench.rows[-len(times) :]:
        row["model"] = "MiniLM's shape"
    for session in opened.values():
        session.close()


def chosen(documents: list[str], tokenizer: Any, count: int) -> list[str]:
    """Sentences of the lengths ``LENGTHS``, in random order."""
    texts: list[str] = []
    for text in documents:
        pieces = list(_pieces(text))
        ids = tokenizer.encode_batch(pieces)
        texts += [
            piece for piece, tokens in zip(pieces, ids, strict=True) if LENGTHS[0] <= len(tokens) + 2 <= LENGTHS[1]
        ]
        if len(texts) >= 4 * count:
            break
    return [texts[index] for index in np.random.default_rng(0).permutation(len(texts))[:count]]


def _pieces(text: str) -> Iterator[str]:
    starts = [*sentence_starts(text), len(text)]
    yield from (" ".join(text[first:end].split()) for first, end in itertools.pairwise(starts))


@torch.inference_mode()
def embedded(model: Any, tokenizer: Any, texts: list[str], size: int, ordered: bool) -> np.ndarray:
    """The usual loop over transformers: batches of texts, padded to the longest, and the mean over their tokens."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index])) if ordered else list(range(len(texts)))
    vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
    for first in range(0, len(texts), size):
        part = order[first : first + size]
        batch = tokenizer([texts[index] for index in part], padding=True, return_tensors="pt").to(model.device)
        states = model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"][..., None]
        vectors[part] = ((states * mask).sum(1) / mask.sum(1)).cpu().numpy()
    return vectors


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# ---- main ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="ways to run transformers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--texts", type=Path, help="file of sentences, instead of the shipped texts")
    parser.add_argument("--most-tokens", type=int, default=1 << 20, help="leaves out larger batches of the encoder")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    bench = Bench(settings := parser.parse_args())
    for part in settings.parts:
        start = time.perf_counter()
        if part == "encoder":
            encoder_calls(bench, settings.most_tokens)
        else:
            sentences(bench, settings.texts)
        print(f"  ({part} took {time.perf_counter() - start:.0f} s)", flush=True)
        bench.free()
    if settings.out is not None:
        print(write(settings.out, bench, "inference"))


if __name__ == "__main__":
    main()
