"""torch's gloo corrupts the heap where coalesced gathers end at the same time as another collective of their group.

Both of a gloo group's worker threads assign `pgStatus_->lastCompletedWorkName` without a lock, once their work has
ended (`ProcessGroupGloo::runLoop`). A string of up to 15 characters has no memory of its own to free, and all other
names are as short; `ALLGATHER_COALESCED` has 19, so its memory is freed twice, or written to afterwards. Found in
torch 2.13; no issue upstream is known. `transport.py` joins gathers itself.
"""

from __future__ import annotations

import subprocess
import sys

BUSY = """
import resource, time, torch, torch.distributed as dist
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
large, small = torch.zeros(2**24, dtype=torch.uint8), torch.zeros(1)
gathered = torch.empty_like(large), torch.empty_like(large), torch.empty_like(small)
end = time.monotonic() + 40
while time.monotonic() < end:
    # The large ones keep both threads busy while small ones queue up, which then end in quick succession.
    works = [group.allgather_into_tensor_coalesced([g], [large]) for g in gathered[:2]]
    works += [group.allgather_into_tensor_coalesced([gathered[2]], [small]) for _ in range(1000)]
    for work in works:
        work.wait()
"""


def test_several_coalesced_gathers_still_corrupt_the_heap() -> None:
    """If this fails repeatedly, torch is fixed, and `transport.start_all_gather` may leave joining to it."""
    ended = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True)
    assert ended.returncode < 0, ended.stderr[-500:]
