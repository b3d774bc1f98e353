"""Storages that are emptied and filled again, on plain tensors."""

import torch

from rlhf_megatron.engine.offload import (
    WEIGHTS,
    Copier,
    HostMemory,
    OffloadedPart,
    RoleMemory,
    storage_bytes,
)

CPU = torch.device("cpu")


def make_part(tensors, *, copier=None, **options) -> OffloadedPart:
    copier = copier or Copier(CPU, current_phase=lambda: "value")
    return OffloadedPart(
        WEIGHTS, tensors=lambda: tensors, copier=copier, host=HostMemory(pin=False), **options
    )


def test_views_of_a_flat_buffer_stay_what_they_are():
    flat = torch.arange(1000, dtype=torch.float32)
    views = {"a": flat[:100].view(10, 10), "b": flat[100:]}
    half = torch.arange(7, dtype=torch.bfloat16)
    part = make_part({**views, "half": half, "nothing": torch.empty(0)})
    expected = [t.clone() for t in (flat, *views.values(), half)]
    part.release()
    assert not part.is_here and part.away_bytes == 4000 + 14
    assert flat.untyped_storage().nbytes() == half.untyped_storage().nbytes() == 0
    assert torch.equal(part.host_view(views["a"]), expected[1])
    assert torch.equal(part.host_view(half), expected[3])
    assert part.host_view(torch.ones(3)) is None
    part.release()  # twice does nothing
    part.fetch()
    part.fetch()
    part.wait()
    for found, before in zip((flat, *views.values(), half), expected, strict=True):
        assert torch.equal(found, before)
    flat[5] = -1
    assert views["a"][0, 5] == -1  # still one storage


def test_a_copy_is_made_only_of_what_may_have_changed():
    tensor, copier = torch.zeros(100), Copier(CPU, current_phase=lambda: "value")
    part = make_part({"t": tensor}, copier=copier)
    moved = []
    for changes in (False, False, True, False):
        if changes:
            part.will_change()
            tensor += 1
        part.release()
        part.fetch()
        moved.append([(t.direction, t.num_bytes, t.phase) for t in copier.take_finished()])
    both = [("to_host", 400, "value"), ("to_device", 400, "value")]
    assert moved == [both, both[1:], both, both[1:]]
    assert torch.equal(tensor, torch.ones(100))
    assert part.num_releases == 4 and part.size_bytes == 400


def test_gradients_come_back_as_zeros_without_a_copy():
    gradient, copier = torch.ones(50), Copier(CPU, current_phase=lambda: "")
    part = make_part({"g": gradient}, copier=copier, keeps_values=False)
    part.release()
    assert gradient.untyped_storage().nbytes() == 0
    part.fetch()
    assert torch.equal(gradient, torch.zeros(50)) and copier.take_finished() == []


def test_tensors_that_come_later_get_a_place_of_their_own_once():
    tensors = {"master": torch.ones(300)}
    host = HostMemory(pin=False)
    part = OffloadedPart(
        "optimizer",
        tensors=lambda: tensors,
        copier=Copier(CPU, current_phase=lambda: ""),
        host=host,
    )
    counts = []
    for cycle in range(50):
        if cycle == 2:  # the first step brings moments
            tensors |= {"exp_avg": torch.full((300,), 2.0), "exp_avg_sq": torch.full((300,), 3.0)}
            part.will_change()
        part.release()
        counts.append((host.num_allocations, host.num_bytes))
        part.fetch()
    assert counts[:2] == [(1, 1536)] * 2  # 1200 bytes, aligned to 512
    assert counts[2:] == [(2, 3 * 1536)] * 48
    assert [float(t.mean()) for t in tensors.values()] == [1.0, 2.0, 3.0]


def test_counting_alone_moves_nothing():
    tensor = torch.ones(100)
    part = make_part({"t": tensor}, moves=False)
    part.release()
    assert part.away_bytes == 400 and not part.is_here
    assert tensor.untyped_storage().nbytes() == 400 and part.host_view(tensor) is None
    part.fetch()
    assert part.is_here and part.away_bytes == 0


def test_on_device_leaves_things_as_they_were():
    tensor = torch.ones(10)
    memory = RoleMemory()
    with memory.on_device(WEIGHTS, writes=True):  # without parts: nothing
        assert memory.readable(tensor) is tensor
    memory.parts[WEIGHTS] = make_part({"t": tensor})
    with memory.on_device(WEIGHTS):
        pass
    assert memory.is_here(WEIGHTS)
    memory.release(WEIGHTS)
    with memory.on_device(WEIGHTS, writes=True):
        with memory.on_device(WEIGHTS):
            tensor.fill_(4)
        assert memory.is_here(WEIGHTS)
    assert not memory.is_here(WEIGHTS) and storage_bytes({"t": tensor}) == 0
    assert torch.equal(memory.readable(tensor), torch.full((10,), 4.0))
