"""Sessions on a GPU: CUDA graphs and fused kernels give the tokens of plain steps, and do not synchronize."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fasttfm.generate.decoder as decoder_module
from fasttfm import _native, models
from fasttfm.generate import CachedDecoder, GenerationSession, generate, stream
from fasttfm.nn import PackedBatch
from fasttfm.ops.layers import stack
from fasttfm.testing import compare
from fasttfm.testing.tolerance import OUTPUT_FACTOR

pytestmark = pytest.mark.gpu
hopper = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")

SIZES = {"vocab_size": 1000, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 300}
FAMILIES: dict[str, dict[str, Any]] = {"GPT2": {}, "GPT3": {"local_window": 20}, "OpenAIGPT": {}}


def model(family: str = "GPT2", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(models, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    made = getattr(models, f"{family}LMHeadModel")(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return made.cuda().to(dtype)


def prompts(count: int) -> list[list[int]]:
    lengths = [5 + 37 * index % 200 for index in range(count)]
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 1000, (length,), generator=generator).tolist() for length in lengths]


def run(session: GenerationSession, count: int, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 20, "eos_token_id": [], **options}
    submitted = [session.submit(prompt, seed=index, **options) for index, prompt in enumerate(prompts(count))]
    return [generation.result() for generation in submitted]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize(
    ("dtype", "few_rows_from"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 1)], ids=str
)
def test_logits_of_steps(
    family: str, rows: int, dtype: torch.dtype, few_rows_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of every kind against the whole sequences in fp64."""
    monkeypatch.setattr(decoder_module, "FEW_ROWS_FROM", few_rows_from)
    module = model(family, dtype)
    given = prompts(rows)
    following = torch.randint(0, 1000, (rows, 3), device="cuda")
    decoder = CachedDecoder(module.transformer, 300, rows, fused=True)
    flat = torch.tensor([token for prompt in given for token in prompt], device="cuda")
    bounds = torch.tensor([0, *map(len, given)], device="cuda").cumsum(0).int()
    decoder.read(flat, PackedBatch(bounds, max(map(len, given)), len(flat)))
    found = torch.stack([decoder.next_logits(module.lm_head, following[:, step]) for step in range(3)], 1)
    for row in (0, rows - 1):
        whole = torch.cat([torch.tensor(given[row], device="cuda"), following[row]])[None]
        with torch.no_grad():
            expected = module(whole).logits[0, -3:]
            exact = module.double()(whole).logits[0, -3:]
        module.to(dtype)
        comparison = compare("logits", found[row].to(dtype), expected, exact, OUTPUT_FACTOR)
        assert comparison.ok, str(comparison)


@hopper
@pytest.mark.parametrize("family", [*FAMILIES, "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prompts_are_read_by_the_core(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states and the cache against fp64, next to those of the layers' ops."""
    if family == "Qwen3":
        sizes = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 300}
        torch.manual_seed(0)
        module: Any = models.Qwen3Model(models.Qwen3Config(**sizes, **heads)).eval().cuda().to(dtype)
    else:
        module = model(family, dtype).transformer
    given = prompts(6)
    flat = torch.tensor([token for prompt in given for token in prompt], device="cuda")
    bounds = torch.tensor([0, *map(len, given)], device="cuda").cumsum(0).int()
    batch, slots = PackedBatch(bounds, max(map(len, given)), len(flat)), torch.tensor([4, 7, 0, 2, 1, 5], device="cuda")
    found, plain, exact = (CachedDecoder(each, 300, 8) for each in (module, module, module))
    by_core: list[Any] = []
    run_core = stack.run_cached
    monkeypatch.setattr(stack, "run_cached", lambda *call: by_core.append(run_core(*call)) or by_core[-1])
    states = [found.read(flat, batch, slots)]
    assert [each is not None for each in by_core] == [True]
    monkeypatch.setattr(CachedDecoder, "_read_whole", lambda *_: None)
    states.append(plain.read(flat, batch, slots))
    module.double()
    states.append(exact.read(flat, batch, slots))
    for name, tensors in (
        ("states", states),
        ("keys", [each.keys for each in (found, plain, exact)]),
        ("values", [each.values for each in (found, plain, exact)]),
    ):
        comparison = compare(name, *tensors, OUTPUT_FACTOR)
        assert comparison.ok, str(comparison)
    assert not found.keys[:, [3, 6]].any()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95}])
def test_graphs_and_batches_change_no_token(options: dict[str, Any]) -> None:
    module = model()
    plain = run(GenerationSession(module, max_batch=8, graphs=False, fused=False), 7, **options)
    for batch in (1, 3, 8):
        assert run(GenerationSession(module, max_batch=batch), 7, **options) == plain


def test_steps_do_not_synchronize() -> None:
    module = model()
    session = GenerationSession(module, max_batch=4)
    run(session, 4)
    running = [session.submit(prompt, max_new_tokens=30, eos_token_id=[]) for prompt in prompts(4)]
    next(iter(running[0]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            session._step(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_follow_the_model() -> None:
    module = model()
    session = GenerationSession(module, max_batch=2)
    run(session, 2)
    with torch.no_grad():
        module.transformer.encoder.layers[0].up.weight.mul_(-1.0)  # in place
        module.lm_head.decoder.weight = torch.nn.Parameter(module.lm_head.decoder.weight.flip(0).contiguous())
    expected = run(GenerationSession(module, max_batch=2, graphs=False, fused=False), 2)
    assert run(session, 2) == expected


def test_modules_with_hooks_are_called() -> None:
    module = model()
    session = GenerationSession(module, max_batch=2)
    run(session, 2)
    calls: list[int] = []
    handle = module.transformer.encoder.layers[0].up.register_forward_hook(lambda *_: calls.append(1))
    hooked = run(session, 2)
    assert len(calls) >= 20
    handle.remove()
    assert run(session, 2) == hooked


def test_generate_and_stream() -> None:
    module = model()
    ids = torch.randint(0, 1000, (3, 12), device="cuda")
    found = generate(module, ids, max_new_tokens=15, eos_token_id=[])
    session = GenerationSession(module, max_batch=3, graphs=False, fused=False)
    expected = [session.submit(row, max_new_tokens=15, eos_token_id=[]).result() for row in ids]
    assert found[:, 12:].tolist() == expected
    assert list(stream(module, ids[1], max_new_tokens=15, eos_token_id=[])) == expected[1]


def test_calls_on_two_streams_do_not_change_the_cache() -> None:
    """An ended sequence still appends tokens to its slot while the next one, on another stream, takes the slot."""
    torch.manual_seed(0)
    config = models.GPT2Config(vocab_size=1000, n_embd=1024, n_layer=12, n_head=16, n_positions=512)
    module = models.GPT2LMHeadModel(config).cuda().bfloat16().eval()
    session = GenerationSession(module, max_batch=1, max_length=512)
    first, second = (torch.randint(0, 1000, (length,)).tolist() for length in (40, 200))

    def tokens(prompt: list[int], ends: list[int]) -> list[int]:
        return list(session.submit(prompt, max_new_tokens=60, eos_token_id=ends).result())

    def cached() -> list[torch.Tensor]:
        torch.cuda.synchronize()
        caches = (session.decoder.keys, session.decoder.values)
        return [each[:, 0, :, : len(second)].clone() for each in caches]

    ends = tokens(first, [])[:1]  # ends the first sequence at once, while the steps after it are in flight
    expected_tokens = tokens(second, [])
    expected = cached()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            tokens(first, ends)
        with torch.cuda.stream(streams[1]):
            assert tokens(second, []) == expected_tokens
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(cached(), expected, strict=True))


def test_changes_of_parameters_on_any_stream_are_ordered() -> None:
    """Before a call they are read, and after it they do not change the steps in flight."""
    module = model()
    session = GenerationSession(module, max_batch=1)
    weight = module.transformer.encoder.layers[0].up.weight
    before = run(session, 1)
    saved = weight.detach().clone()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        torch.cuda._sleep(20_000_000)
        weight.neg_()
        changed = run(session, 1)
        weight.copy_(saved)
        assert run(session, 1) == before
    torch.cuda.synchronize()
    assert changed != before


def test_a_moved_model_is_refused_and_its_memory_kept() -> None:
    module = model()
    expected = run(GenerationSession(module, max_batch=2), 2)
    session = GenerationSession(module, max_batch=2)
    assert run(session, 2) == expected
    module.cpu()
    filled = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]  # in memory that the model has freed
    with pytest.raises(ValueError, match="expected parameters in float32 on cuda:0 as at first, got float32 on cpu"):
        session.submit([1, 2, 3])
    module.cuda()
    assert run(session, 2) == expected
    del filled


FAULT = """
import sys

import torch
import triton
import triton.language as tl

from fasttfm.generate import GenerationSession
from fasttfm.models import GPT2Config, GPT2LMHeadModel


@triton.jit
def store(target, offset):
    tl.store(target + tl.load(offset), 1)


sizes = {"vocab_size": 300, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 100}
model = GPT2LMHeadModel(GPT2Config(**sizes)).cuda().eval()
session = GenerationSession(model, max_batch=4, graphs=sys.argv[1] == "1")
target, offset = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
next_logits = session.decoder.next_logits


def faulty(*arguments):
    store[(1,)](target, offset)
    return next_logits(*arguments)


session.decoder.next_logits = faulty
options = {"max_new_tokens": 60, "eos_token_id": []}
assert len(session.submit([1, 2, 3], **options).result()) == 60
running = [session.submit([number, 7], **options) for number in range(3)]
next(iter(running[0]))
offset.fill_(1 << 40)  # from now on the kernel writes to an address far outside of any memory
torch.cuda.synchronize()
for generation in running:
    try:
        generation.result()
    except RuntimeError as error:
        assert "illegal" in str(error), error
    else:
        sys.exit("no error")
del session, running, generation
print("freed")
sys.exit(7)
"""


@pytest.mark.parametrize("graphs", [0, 1])
def test_a_failed_kernel(graphs: int, tmp_path: Path) -> None:
    """In a process of its own, which ends with its exit code: it neither hangs nor aborts."""
    path = tmp_path / "fault.py"  # Triton reads the source of kernels
    path.write_text(FAULT)
    found = subprocess.run([sys.executable, str(path), str(graphs)], capture_output=True, text=True, timeout=180)
    assert found.returncode == 7, f"exit code {found.returncode}\n{found.stdout}\n{found.stderr}"
    assert "freed" in found.stdout
    assert "terminate" not in found.stderr
