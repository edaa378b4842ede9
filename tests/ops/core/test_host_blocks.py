"""Blocks of host memory: used again when the last tensor in them has gone, and returned when nothing uses them."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from fasttfm.nn import PackedLayer, PackedTransformer
from fasttfm.ops import cu_seqlens_from_lengths
from fasttfm.ops.core import host_blocks
from fasttfm.ops.core.host_blocks import HostBlocks

MIB = 1 << 20


def test_a_block_is_used_again_when_its_last_tensor_has_gone() -> None:
    blocks = HostBlocks()
    first = blocks.empty(3 * MIB)
    address, view = first.data_ptr(), first[MIB : MIB + 4].view(torch.float32)
    assert address % 64 == 0
    assert len(first) == 3 * MIB
    del first
    other = blocks.empty(3 * MIB)
    assert other.data_ptr() != address
    view.fill_(1.0)
    other.fill_(0)
    assert view.item() == 1.0
    del view
    assert blocks.free_bytes() >= 3 * MIB
    nearly = blocks.empty(3 * MIB - 5)  # sizes are rounded up
    assert nearly.data_ptr() == address
    assert len(nearly) == 3 * MIB - 5
    assert blocks.free_bytes() == 0


@pytest.mark.parametrize("count", [MIB, MIB + 1, 3 * MIB + 7, (1 << 24) - 1, 1 << 24])
def test_all_bytes_can_be_written(count: int) -> None:
    for _ in range(2):
        tensor = HostBlocks().empty(count).fill_(7)
        assert int(tensor.sum()) == 7 * count


def test_small_tensors_are_not_of_blocks() -> None:
    blocks = HostBlocks()
    blocks.empty(MIB - 1)
    assert blocks.free_bytes() == 0


def test_a_larger_block_serves_a_request_of_half_its_size() -> None:
    blocks = HostBlocks()
    address = blocks.empty(4 * MIB).data_ptr()
    half = blocks.empty(2 * MIB)
    assert half.data_ptr() == address
    del half
    blocks.empty(MIB)  # less than half
    assert blocks.free_bytes() == 5 * MIB


def test_blocks_that_requests_do_not_use_are_returned() -> None:
    blocks = HostBlocks()
    blocks.empty(8 * MIB)
    for _ in range(2 * host_blocks._REQUESTS - 2):
        assert blocks.free_bytes() >= 8 * MIB
        blocks.empty(MIB)
    blocks.empty(MIB)
    assert blocks.free_bytes() <= 2 * MIB


def test_blocks_of_many_sizes_have_at_most_twice_the_bytes_in_use() -> None:
    blocks, generator = HostBlocks(), random.Random(0)
    tensors: list[torch.Tensor] = []
    most, largest = 0, 0
    for _ in range(5000):
        if len(tensors) == 4:
            tensors.pop(generator.randrange(4))
        tensors.append(blocks.empty(int(2 ** generator.uniform(20, 24))))
        most = max(most, sum(map(len, tensors)))
        largest = max(largest, sum(map(len, tensors)) + blocks.free_bytes())
    assert largest <= 2 * most * (1 + 1 / host_blocks._PARTS)  # sizes are rounded up


def test_threads_have_blocks_of_their_own() -> None:
    blocks, errors = HostBlocks(), []

    def work(number: int) -> None:
        for _ in range(200):
            tensor = blocks.empty(MIB).fill_(number)
            if not bool((tensor[::4096] == number).all()):
                errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert blocks.free_bytes() < 10 * MIB  # each thread has two at a time


def test_layers_take_the_blocks_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = HostBlocks()
    monkeypatch.setattr(host_blocks, "_blocks", blocks)
    torch.manual_seed(0)
    module = PackedTransformer([PackedLayer(64, 2, 256) for _ in range(2)]).eval()  # without dropout
    x, bounds = torch.randn(1000, 64, requires_grad=True), cu_seqlens_from_lengths([400, 600])
    gradients, bytes_of_a_step = [], []
    for _ in range(3):
        x.grad = None
        y = module(x, bounds, 600)
        saved = blocks.free_bytes()
        y.square().sum().backward()
        assert blocks.free_bytes() > saved
        del y
        gradients.append(x.grad)
        bytes_of_a_step.append(blocks.free_bytes())
    assert bytes_of_a_step[0] > MIB
    assert bytes_of_a_step[1] == bytes_of_a_step[2] == bytes_of_a_step[0]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
