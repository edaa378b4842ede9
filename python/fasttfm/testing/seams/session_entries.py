"""Entry points of inference sessions, of generation and of generation sessions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fasttfm import generate
from fasttfm.inference import Session
from fasttfm.inference.cpu_linear import pack_linears
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head
from fasttfm.testing.seams.entry import EntryPoint, Inputs, Tensors, copy_weights
from fasttfm.testing.seams.model_entries import LENGTH, VOCABULARY, _evaluated, small_model
from fasttfm.testing.seams.module_entries import LENGTHS, WIDTH, bounds_of, rows

_HOST = "its inputs are lists of the host"
_OWN = "a session belongs to one model, and is not copied with it"
_SEPARATE = {"deep copy": _OWN, "pickle": _OWN, "separate copies": _OWN}
_CAPTURE = "results are arrays on the host, which no CUDA graph can return"
# By precision: int8 layers in one native call have multiples of 32, those in FP8 a head dim of 64.
SIZES: dict[str, dict[str, Any]] = {
    "int8": {"intermediate_size": 64},
    "fp8": {"hidden_size": 128, "intermediate_size": 256},
}
FP8 = {"precision": "fp8", "calibration": [list(range(5, 14)), [50, 7, 9, 33]]}
# Among the numbers that int8 layers round in these entries, one is within 1e-4 of a step from the border of two steps.
_BORDERS = "a number on the border of two steps of int8 is rounded to either of them"
_ON_BORDER = {"other instruction sets": _BORDERS}
_ON_HOST = {"capture": _CAPTURE, "first use in a capture": _CAPTURE, "fake tensors first": _HOST}


@dataclass
class Opened:
    """A model and its session."""

    model: Any
    session: Any


def _ids(seed: int, _: torch.device) -> Inputs:
    """On the host, for any device."""
    generator = torch.Generator().manual_seed(300 + seed)
    return {"ids": torch.randint(5, VOCABULARY - 1, (3, LENGTH), generator=generator)}


def _lists(inputs: Inputs) -> list[list[int]]:
    """Sequences of several lengths."""
    return [ids[: LENGTH - 3 * index] for index, ids in enumerate(inputs["ids"].tolist())]


# ---- inference sessions ----------------------------------------------------------------------------------------------


def _text_families() -> dict[str, Any]:
    return {name: family for name, family in FAMILIES.items() if family.tokenizer is not None}


def _model(name: str, precision: str | None, device: torch.device) -> Any:
    sizes = SIZES.get(precision or "", {})
    return _evaluated(functools.partial(small_model, FAMILIES[name], Head.NONE, **sizes), device)


def _session(name: str, options: dict[str, Any], device: torch.device) -> Opened:
    return _open(_model(name, options.get("precision"), device), options, device)


def _open(model: Any, options: dict[str, Any], device: torch.device) -> Opened:
    return Opened(model, Session(model, device=device, **options))


def _encode(opened: Opened, inputs: Inputs) -> Tensors:
    """On a GPU the results of a second call: those of the CUDA graph, which all later calls replay. The first call runs
    the batch's own number of rows, for which cuBLAS may add in another order than for the graph's."""
    if opened.session.device.type == "cuda":
        _encode_once(opened, inputs)
    return _encode_once(opened, inputs)


def _encode_once(opened: Opened, inputs: Inputs) -> Tensors:
    ids = _lists(inputs)
    results = {"vectors": torch.from_numpy(opened.session.encode(ids))}
    states = opened.session.encode(ids, output="states")
    return results | {f"states {index}": torch.from_numpy(rows) for index, rows in enumerate(states)}


def _take_weights(options: dict[str, Any], opened: Opened) -> None:
    """As the documentation says: a new session if this one cannot take them."""
    if not opened.session.take_weights(opened.model):
        opened.session = Session(opened.model, device=opened.session.device, **options)


def _rebuilt(name: str, options: dict[str, Any], opened: Opened, device: torch.device) -> Opened:
    model = _model(name, options.get("precision"), device)
    copy_weights(opened.model, model)
    return _open(model, options, device)


@functools.cache
def native_int8() -> tuple[str, ...]:
    """The first family of each kind that the native call of int8 layers distinguishes: post-LN, pre-LN, shared
    layers, and both norms with rotary positions."""
    names: dict[Any, str] = {}
    for name in _text_families():
        encoder = _packed_encoder(name, "int8", torch.device("cpu"))
        if encoder.packed is not None:
            shared = len(encoder.layers) < len(encoder.in_order())
            names.setdefault((encoder.final_norm is None, shared, bool(encoder.rotations())), name)
    return tuple(names.values())


def _one_by_one(opened: Opened, inputs: Inputs) -> Tensors:
    """Int8 layers without the native call."""
    encoder = opened.session.network.base.encoder
    native, encoder.packed = encoder.packed, None
    try:
        return _encode(opened, inputs)
    finally:
        encoder.packed = native


def session_entries(device: str) -> list[EntryPoint]:
    """Of every family that reads text, in the session's default precision; of some also in 8 bits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain: list[tuple[str, dict[str, Any]]] = [(name, {"dtype": dtype}) for name in _text_families()]
    int8 = native_int8() if device == "cpu" else ()
    small: list[tuple[str, dict[str, Any]]] = [(name, {"precision": "int8"}) for name in int8]
    entries = []
    for name, options in [*plain, *small, (next(iter(_text_families())), FP8)]:
        precision = options.get("precision")
        entries.append(
            EntryPoint(
                name=", ".join(["inference.Session", name, *([precision] if precision else [])]),
                covers=("inference.Session",),
                make=functools.partial(_session, name, options),
                inputs=_ids,
                call=_encode,
                reference=_one_by_one if precision == "int8" else None,
                module=lambda opened: opened.model,
                rebuild=functools.partial(_rebuilt, name, options),
                refresh=functools.partial(_take_weights, options),
                left_out={
                    **_SEPARATE,
                    **_ON_HOST,
                    **(_ON_BORDER if (name, precision) == ("modernbert", "int8") else {}),
                },
            )
        )
    return [*entries, *(_packed_layers(name, precision) for precision in ("int8", "fp32") for name in int8)]


# ---- packed layers, which sessions call with a lock ------------------------------------------------------------------


def _packed_encoder(name: str, precision: str, device: torch.device) -> Any:
    model = _model(name, "int8", device)
    pack_linears(model, precision)
    return model.encoder


def _packed_inputs(seed: int, device: torch.device) -> Inputs:
    x = rows(seed, device, sum(LENGTHS), WIDTH)
    return {"x": x, "cu_seqlens": bounds_of(device), "max_seqlen": max(LENGTHS)}


def _run_packed(encoder: Any, inputs: Inputs) -> Tensors:
    with torch.no_grad():
        return {"y": encoder(inputs["x"], inputs["cu_seqlens"], inputs["max_seqlen"])}


def _run_one_by_one(encoder: Any, inputs: Inputs) -> Tensors:
    native, encoder.packed = encoder.packed, None
    try:
        return _run_packed(encoder, inputs)
    finally:
        encoder.packed = native


def _packed_layers(name: str, precision: str) -> EntryPoint:
    return EntryPoint(
        name=f"{precision} layers, {name}",
        make=functools.partial(_packed_encoder, name, precision),
        inputs=_packed_inputs,
        call=_run_packed,
        left_out=_ON_BORDER if (name, precision) == ("nomic_bert", "int8") else {},
        reference=_run_one_by_one,
    )


# ---- generation ------------------------------------------------------------------------------------------------------


def _causal(name: str, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return _evaluated(functools.partial(small_model, FAMILIES[name], Head.CAUSAL_LM), device).to(dtype)


def _generate(model: Any, inputs: Inputs) -> Tensors:
    device = next(model.parameters()).device
    ids = inputs["ids"].to(device)
    greedy = generate.generate(model, ids, max_new_tokens=4)
    beams = generate.generate(model, ids, max_new_tokens=3, num_beams=2)
    stream = list(generate.stream(model, ids[0], max_new_tokens=4))
    return {"greedy": greedy, "beams": beams, "stream": torch.tensor(stream, device="cpu")}


def _generation_session(name: str, device: torch.device) -> Opened:
    model = _causal(name, device)
    return Opened(model, generate.GenerationSession(model, max_batch=2, max_length=24))


def _rebuilt_generation(name: str, opened: Opened, device: torch.device) -> Opened:
    model = _causal(name, device)
    copy_weights(opened.model, model)
    return Opened(model, generate.GenerationSession(model, max_batch=2, max_length=24))


def _continue(opened: Opened, inputs: Inputs) -> Tensors:
    """Three sequences in two slots; the last one is drawn."""
    options: list[dict[str, Any]] = [{}, {}, {"do_sample": True, "seed": 7}]
    waiting = [
        opened.session.submit(ids, max_new_tokens=4 + index, **options[index])
        for index, ids in enumerate(_lists(inputs))
    ]
    return {f"tokens {i}": torch.tensor(sequence.result(), device="cpu") for i, sequence in enumerate(waiting)}


def generation_entries() -> list[EntryPoint]:
    entries = []
    shared: dict[str, Any] = {"inputs": _ids}
    for name in (name for name, family in FAMILIES.items() if family.causal):
        entries.append(
            EntryPoint(
                name=f"generate.generate, {name}",
                covers=("generate.generate", "generate.stream", "generate.release"),
                make=functools.partial(_causal, name),
                call=_generate,
                module=lambda model: model,
                left_out=dict(_ON_HOST),
                **shared,
            )
        )
        entries.append(
            EntryPoint(
                name=f"generate.GenerationSession, {name}",
                covers=("generate.GenerationSession",),
                make=functools.partial(_generation_session, name),
                call=_continue,
                module=lambda opened: opened.model,
                rebuild=functools.partial(_rebuilt_generation, name),
                left_out={**_SEPARATE, **_ON_HOST},
                refuses={
                    "alternating autocast": "generate: autocast: expected",
                    "cast": "GenerationSession: model: expected parameters in",
                },
                **shared,
            )
        )
    return entries
