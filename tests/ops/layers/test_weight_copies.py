"""16-bit copies of parameters: when a forward uses one, and that training with them changes no bit."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttfm.nn import PackedLayer
from fasttfm.ops import linear
from fasttfm.ops.core import weight_copies
from fasttfm.optim import AdamW

BF16 = torch.bfloat16
HELD: list[Any] = []


def to_write(parameter: Tensor, *, captured: bool = False) -> Tensor | None:
    """The copy that a step of an optimizer writes."""
    (entry,) = weight_copies.entries_of([parameter])
    return None if entry is None else entry.to_write(parameter, captured=captured)


@pytest.fixture(autouse=True)
def held() -> Iterator[list[Any]]:
    """The entries that an optimizer would hold."""
    HELD.clear()
    yield HELD
    HELD.clear()


def with_copy(dtype: torch.dtype = BF16) -> tuple[nn.Parameter, Tensor]:
    parameter = nn.Parameter(torch.randn(4, 6))
    HELD.extend(weight_copies.enroll([parameter]))
    assert weight_copies.copies_of([parameter], dtype)[0] is None
    found = to_write(parameter)
    assert found is not None
    assert weight_copies.copies_of([parameter], dtype)[0] is found
    return parameter, found


def test_there_is_no_copy_unless_it_is_requested() -> None:
    parameter = nn.Parameter(torch.randn(4))
    assert weight_copies.copies_of([parameter], BF16)[0] is None
    assert to_write(parameter) is None
    entries = weight_copies.enroll([parameter])
    assert len(entries) == 1
    assert to_write(parameter) is None  # no forward has requested one
    with torch.inference_mode():
        uncounted = torch.randn(4)
    assert weight_copies.enroll([uncounted]) == []
    assert weight_copies.copies_of([uncounted], BF16)[0] is None


@pytest.mark.parametrize(
    "change",
    [
        lambda p: nn.init.normal_(p),
        lambda p: p.detach().mul_(2),
        lambda p: setattr(p, "data", torch.ones(4, 6)),
        lambda p: torch.optim.SGD([p], lr=1.0).step(),
        lambda p: torch.optim.SGD([p], lr=1.0, fused=True).step(),  # torch does not count what this one does
        lambda p: AdamW([p], weight_copies=True).step(),
    ],
    ids=["init", "detached", "other memory", "optimizer", "fused optimizer", "step on a CPU"],
)
def test_a_copy_is_valid_until_the_parameter_changes(change: Callable[[nn.Parameter], Any]) -> None:
    parameter, found = with_copy()
    parameter.grad = torch.ones(4, 6)
    AdamW([parameter], weight_copies=True)  # registers hooks for torch's optimizers
    change(parameter)
    assert weight_copies.copies_of([parameter], BF16)[0] is None
    weight_copies.refresh(HELD)
    assert weight_copies.copies_of([parameter], BF16)[0] is found  # the same memory, because a CUDA graph may read it
    assert torch.equal(found, parameter.bfloat16())


def test_changes_that_torch_does_not_count_need_a_full_refresh() -> None:
    parameter, found = with_copy()
    parameter.data.zero_()
    assert weight_copies.copies_of([parameter], BF16)[0] is found
    weight_copies.refresh(HELD)
    assert found.count_nonzero() > 0
    weight_copies.refresh(HELD, everything=True)
    assert found.count_nonzero() == 0


def test_another_type_is_another_copy() -> None:
    parameter, _ = with_copy()
    assert weight_copies.copies_of([parameter], torch.float16)[0] is None
    found = to_write(parameter)
    assert found is not None
    assert found.dtype == torch.float16


def test_copies_go_with_their_optimizer() -> None:
    parameter = nn.Parameter(torch.randn(4, 6))
    optimizer = AdamW([parameter], weight_copies=True)
    weight_copies.copies_of([parameter], BF16)[0]
    gone = weakref.ref(to_write(parameter))
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3))]})
    assert weight_copies.copies_of([parameter], BF16)[0] is gone() is not None
    del optimizer
    gc.collect()
    assert gone() is None
    assert weight_copies.copies_of([parameter], BF16)[0] is None


def test_another_tensor_at_the_same_address_has_no_copy() -> None:
    parameter, _ = with_copy()
    key = id(parameter)
    del parameter
    gc.collect()
    assert weight_copies._entries[key]().reference() is None


def test_copied_and_pickled_modules_have_no_copies() -> None:
    parameter, _ = with_copy()
    module = nn.Module()
    module.weight = parameter
    # A copy would have 48 bytes of its own; the names of storages in a pickle vary by a few bytes.
    size = len(pickle.dumps(nn.ParameterList([nn.Parameter(torch.randn(4, 6))])))
    assert abs(len(pickle.dumps(nn.ParameterList([parameter]))) - size) < 2 * parameter.numel()
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert weight_copies.copies_of([each.get_parameter("weight")], BF16) == [None]


def test_a_captured_step_invalidates_copies_that_it_does_not_write() -> None:
    kept, found = with_copy()
    stale, _ = with_copy()
    nn.init.zeros_(stale)
    assert to_write(kept, captured=True) is found
    assert to_write(stale, captured=True) is None
    weight_copies.enroll([stale])
    assert weight_copies.copies_of([stale], BF16)[0] is None
    assert to_write(stale) is None  # permanently


def stepped(parameter: nn.Parameter) -> None:
    """A step that torch's version counter does not see by itself."""
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=0.1, fused=True).step()


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "counted": nn.init.ones_,
    "fused step": lambda p: stepped(p),
    "refreshed": lambda p: weight_copies.refresh(HELD, everything=True),
    "another type": lambda p: weight_copies.copies_of([p], torch.float16)[0],
    "enrolled": lambda p: HELD.extend(weight_copies.enroll([nn.Parameter(torch.ones(2))])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_steps_look_up_copies_again_after_a_change(name: str) -> None:
    parameter, found = with_copy()
    other = nn.Parameter(torch.randn(3))
    HELD.extend(weight_copies.enroll([other]))
    step = weight_copies.StepCopies([other, parameter], enrolled=True)
    copies = step.find(captured=False, moved=True)
    assert copies is not None
    assert copies[0] is None
    assert copies[1] is found
    step.written()
    assert weight_copies.copies_of([parameter], BF16)[0] is found
    assert step.find(captured=False, moved=False) is None
    step.written()
    assert weight_copies.copies_of([parameter], BF16)[0] is found  # caches its version
    CHANGES[name](parameter)
    copies = step.find(captured=False, moved=False)
    assert copies is not None
    assert copies[1] is not None
    assert torch.equal(copies[1].float(), parameter.to(copies[1].dtype).float())
    step.written()
    assert weight_copies.copies_of([other], BF16)[0] is None  # requests it
    copies = step.find(captured=False, moved=False)
    assert copies is not None
    assert copies[0] is not None


def test_a_parameter_that_has_moved_is_copied_again() -> None:
    parameter, found = with_copy()
    step = weight_copies.StepCopies([parameter], enrolled=True)
    step.find(captured=False, moved=True)
    step.written()
    parameter.data = torch.zeros(4, 6)
    copies = step.find(captured=False, moved=True)
    assert copies is not None
    assert copies[0] is found
    assert not found.any()


def test_entries_of_others_are_not_held() -> None:
    parameter, found = with_copy()
    step = weight_copies.StepCopies([parameter], enrolled=False)
    for _ in range(2):
        copies = step.find(captured=False, moved=False)
        assert copies is not None
        assert copies[0] is found
        step.written()
    gone = weakref.ref(found)
    del found, copies
    HELD.clear()
    assert gone() is None


def test_a_backward_detects_a_changed_copy() -> None:
    parameter, found = with_copy()
    y = (torch.ones(3, 6, dtype=BF16, requires_grad=True) @ found.t()).sum()
    step = weight_copies.StepCopies([parameter], enrolled=True)
    step.find(captured=False, moved=False)
    step.written()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_tensors_without_a_copy_are_cast() -> None:
    parameter, found = with_copy()
    other = nn.Parameter(torch.randn(5))
    given = [other, None, parameter]
    with torch.no_grad():
        assert linear.in_type(given, BF16)[2] is not found  # unless they are requested
        cast, nothing, kept = linear.in_type(given, BF16, copies=True)
        assert linear.in_type([parameter], BF16, copies=True)[0] is found
    assert nothing is None
    assert kept is found
    assert torch.equal(cast, other.bfloat16())


def layer(device: str) -> PackedLayer:
    torch.manual_seed(0)
    return PackedLayer(128, 2, 256, dropout=0.0, attention_dropout=0.0).to(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_with_copies_changes_no_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the copies are updated together with torch's step."""
    given: list[list[bool]] = []
    in_type = linear.in_type

    def noted(tensors: Any, dtype: torch.dtype, *, copies: bool = False) -> list[Any]:
        found = in_type(tensors, dtype, copies=copies)
        entries = [weight_copies._entry(each) for each in tensors]
        given.append([e is not None and e.copy is c for e, c in zip(entries, found, strict=True)])
        return found

    monkeypatch.setattr(linear, "in_type", noted)
    results = []
    for copies in (True, False):
        module = layer(device)
        optimizer = AdamW(module.parameters(), lr=1e-2, weight_copies=copies)
        x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).to(device)
        cu_seqlens = torch.tensor([0, 15, 40], dtype=torch.int32, device=device)
        for _ in range(4):
            with torch.autocast(device, dtype=BF16):
                y, _ = module(x.to(BF16), cu_seqlens=cu_seqlens, max_seqlen=25)
            y.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if copies and device == "cpu":
                for each in module.parameters():
                    to_write(each)
        with torch.no_grad(), torch.autocast(device, dtype=BF16):
            module.eval()(x.to(BF16), cu_seqlens=cu_seqlens, max_seqlen=25)
        results.append([each.detach().clone() for each in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    training = [all(each) for each in given[:4]]
    assert training == [False, True, True, True]
    assert not any(any(each) for each in given[4:])  # evaluation and training without copies cast
