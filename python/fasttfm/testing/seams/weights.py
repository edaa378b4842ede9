"""Changes of weights between two calls: the next call uses the new ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.testing.seams.entry import EntryPoint, Inputs, SeamError, Tensors, check_same

Change = Callable[[nn.Module], nn.Module]  # changes a module in place, or returns one that replaces it


def _other(weight: Tensor) -> Tensor:
    """Other numbers: the rows in reverse order, times a factor that is exact in every dtype. A factor by itself would
    not change the tokens that a model generates."""
    return (weight.flip(0) if weight.dim() else weight) * 1.25


def _replace_parameters(module: nn.Module) -> nn.Module:
    """A new ``nn.Parameter`` in the place of each; tied ones stay tied."""
    new: dict[Tensor, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                if parameter not in new:
                    new[parameter] = nn.Parameter(_other(parameter.detach()), parameter.requires_grad)
                setattr(owner, name, new[parameter])
    return module


def _data(module: nn.Module) -> nn.Module:
    """A change that torch's version counters do not count."""
    for parameter in module.parameters():
        parameter.data.copy_(_other(parameter.data))
    return module


def _new_data(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = _other(parameter.data)
    return module


@torch.no_grad()
def _copied(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.copy_(_other(parameter))
    return module


def _scaled_state(module: nn.Module) -> dict[str, Any]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {name: _other(value) if name in parameters else value.clone() for name, value in state.items()}


def _loaded(module: nn.Module) -> nn.Module:
    module.load_state_dict(_scaled_state(module))
    return module


def _assigned(module: nn.Module) -> nn.Module:
    module.load_state_dict(_scaled_state(module), assign=True)
    return module


def _cast(module: nn.Module) -> nn.Module:
    return _copied(module.double())


def _cast_back(module: nn.Module) -> nn.Module:
    dtypes = {parameter.dtype for parameter in module.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return _copied(module.double().to(dtype))


def _moved(module: nn.Module) -> nn.Module:
    """To the host and back: other addresses. On a CPU the memory is replaced."""
    device = next(module.parameters(), torch.empty(0)).device
    if device.type == "cpu":
        return module._apply(lambda tensor: _other(tensor) if tensor.is_floating_point() else tensor.clone())
    return _copied(module.cpu().to(device))


def _deep_copied(module: nn.Module) -> nn.Module:
    return _copied(copy.deepcopy(module))


def _pickled(module: nn.Module) -> nn.Module:
    return _copied(pickle.loads(pickle.dumps(module)))


def _stepped(module: nn.Module) -> nn.Module:
    """A step of torch's fused optimizer, whose changes torch's version counters do not count."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return module
    for parameter in trained:
        parameter.grad = parameter.detach() + 0.1
    torch.optim.AdamW(trained, lr=0.5, fused=True).step()
    for parameter in trained:
        parameter.grad = None
    return module


def _frozen_and_back(module: nn.Module) -> nn.Module:
    before = {parameter: parameter.requires_grad for parameter in module.parameters()}
    module.requires_grad_(False)
    _copied(module)
    for parameter, trained in before.items():
        parameter.requires_grad_(trained)
    return module


CHANGES: dict[str, Change] = {
    "new parameters": _replace_parameters,
    "parameter.data changed in place": _data,
    "parameter.data replaced": _new_data,
    "copied to under no_grad": _copied,
    "load_state_dict": _loaded,
    "load_state_dict(assign=True)": _assigned,
    "cast": _cast,
    "cast and cast back": _cast_back,
    "moved": _moved,
    "deep copy": _deep_copied,
    "pickle": _pickled,
    "a fused optimizer's step": _stepped,
    "frozen and trained again": _frozen_and_back,
}


def check_changed_weights(entry: EntryPoint, device: torch.device, change: str, *, autocast: bool = False) -> None:
    """After a call, the weights change as ``CHANGES[change]`` says; the next call must compute what an object without
    a history computes with these weights, and not what it computed before."""
    assert entry.module is not None
    subject, inputs = entry.make(device), entry.inputs(0, device)

    def call(called: Any) -> Tensors:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):  # whose end clears torch's own copies
            return entry.call(called, inputs)

    before = call(subject)
    original = entry.module(subject)
    changed = CHANGES[change](original)
    if changed is not original:
        subject = _replaced(entry, subject, changed)
    if entry.refresh is not None:
        entry.refresh(subject)
    inputs = _inputs_like(inputs, entry.module(subject))
    results, expected = call(subject), call(entry.fresh(subject, device))
    check_same(results, expected, f"{entry}: {change}")
    if not entry.sets_weights and not _differs(results, before):
        raise SeamError(f"{entry}: {change}: the change of all weights does not change the result")


def check_copy_is_separate(entry: EntryPoint, device: torch.device) -> None:
    """A deep copy shares nothing: a change of the copy's weights does not change the original, nor the reverse."""
    assert entry.module is not None
    subject, inputs = entry.make(device), entry.inputs(0, device)
    before = entry.call(subject, inputs)
    twin = _replaced(entry, subject, copy.deepcopy(entry.module(subject)))
    check_same(entry.call(twin, inputs), before, f"{entry}: a deep copy")
    _copied(entry.module(twin))
    entry.call(twin, inputs)
    check_same(entry.call(subject, inputs), before, f"{entry}: after a change of its deep copy")


def _replaced(entry: EntryPoint, subject: Any, module: nn.Module) -> Any:
    """The object around another module: the module itself."""
    assert entry.module is not None
    if subject is not entry.module(subject):
        raise SeamError(f"{entry}: an object that is no module cannot be copied by its module")
    return module


def _inputs_like(inputs: Inputs, module: nn.Module) -> Inputs:
    """Floating-point inputs in the dtype that the parameters have now."""
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)

    def converted(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64, torch.bfloat16)
        return value.to(dtype) if floating else value

    return {name: converted(value) for name, value in inputs.items()}


def _differs(results: Tensors, before: Tensors) -> bool:
    return any(
        value.dtype != before[name].dtype or value.shape != before[name].shape or not torch.equal(value, before[name])
        for name, value in results.items()
        if name in before
    )


def check_unaffected(entry: EntryPoint, device: torch.device) -> None:
    """A session computes as before after its model is cast or moved: it keeps its device, its dtype and its
    weights."""
    assert entry.module is not None
    for change in (lambda module: module.double(), lambda module: module.to("meta")):
        subject, inputs = entry.make(device), entry.inputs(0, device)
        before = entry.call(subject, inputs)
        change(entry.module(subject))
        check_same(entry.call(subject, inputs), before, f"{entry}: after its model was cast or moved")
