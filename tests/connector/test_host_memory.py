import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvlens.connector.host_memory import HostMemoryWorker

try:
    from vllm.v1.kv_offload.pointer_utils import resolve_device_pointers
except ImportError:  # before 0.34 workers are given block numbers
    resolve_device_pointers = None

BLOCKS, SLOTS, PER_CHUNK = 24, 8, 2
PAGES = (64, 96)


@pytest.fixture
def caches():
    """Two groups: the first has one tensor, the second both, with a shorter page of the last."""
    tensors = [
        CanonicalKVCacheTensor(torch.randint(-128, 127, (BLOCKS, page), dtype=torch.int8), page)
        for page in PAGES
    ]
    refs = [
        [CanonicalKVCacheRef(0, PAGES[0])],
        [CanonicalKVCacheRef(0, PAGES[0]), CanonicalKVCacheRef(1, PAGES[1] - 16)],
    ]
    return CanonicalKVCaches(tensors, refs)


def device(caches, blocks, sizes, indices):
    """Blocks as this vLLM names them to a worker."""
    spec = GPULoadStoreSpec(blocks, sizes, indices)
    return spec if resolve_device_pointers is None else resolve_device_pointers(spec, caches)


def host(slots):
    return SimpleNamespace(block_ids=np.array(slots, dtype=np.int32))


def collect(worker, job_id):
    worker.wait({job_id})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (job_id, True)
    assert worker.get_finished() == []
    return result


@pytest.mark.parametrize("first", [0, 1, 5])
def test_blocks_come_back_as_they_were(caches, first):
    """Group 0 has 3 blocks from block index `first` (perhaps inside a chunk), group 1 has 4."""
    worker = HostMemoryWorker(caches, PER_CHUNK, SLOTS)
    before = [item.tensor.clone() for item in caches.tensors]
    slots = random.Random(first).sample(range(SLOTS), 4)  # 3 blocks span 2 chunks either way
    source, target = [3, 9, 4, 20, 21, 22, 23], [10, 11, 12, 0, 1, 2, 7]
    sizes, indices = (3, 4), (first, 8)

    assert worker.submit_store(1, device(caches, source, sizes, indices), host(slots))
    stored = collect(worker, 1)
    for item in caches.tensors:
        item.tensor.zero_()
    assert worker.submit_load(2, host(slots), device(caches, target, sizes, indices))
    loaded = collect(worker, 2)

    assert torch.equal(caches.tensors[0].tensor[target], before[0][source])
    width = PAGES[1] - 16
    assert torch.equal(caches.tensors[1].tensor[target[3:], :width], before[1][source[3:], :width])
    assert not caches.tensors[1].tensor[target[:3]].any()
    expected = 7 * PAGES[0] + 4 * width
    assert stored.transfer_size == loaded.transfer_size == expected
    assert stored.transfer_time >= 0
    worker.shutdown()


def test_an_empty_group_moves_nothing(caches):
    worker = HostMemoryWorker(caches, PER_CHUNK, SLOTS)
    worker.submit_store(5, device(caches, [1, 2], (0, 2), (0, 0)), host([6]))
    assert collect(worker, 5).transfer_size == 2 * (PAGES[0] + PAGES[1] - 16)
    worker.shutdown()


def test_null_pages_keep_the_places_of_those_after_them(caches):
    """From 0.34 on a chunk is stored whole: what has left the window is the null block, 0."""
    worker = HostMemoryWorker(caches, PER_CHUNK, SLOTS)
    caches.tensors[0].tensor[0] = 0
    kept = caches.tensors[0].tensor[[7, 5, 6]].clone()
    worker.submit_store(1, device(caches, [0, 7, 5, 6], (4, 0), (4, 0)), host([2, 3]))
    collect(worker, 1)
    caches.tensors[0].tensor.zero_()
    # A load that begins at the chunk's second block, as one of a window does.
    worker.submit_load(2, host([2, 3]), device(caches, [11, 12, 13], (3, 0), (5, 0)))
    collect(worker, 2)
    assert torch.equal(caches.tensors[0].tensor[[11, 12, 13]], kept)
    worker.shutdown()
