"""Golden weights: six steps by each rule end in the bytes that version 0.1.0 ended in.

Recorded with version 0.1.0, before the core was rebuilt around Storage, NoiseKey and rules. Starts and votes are integers
drawn by Philox, so the bytes depend on no processor, no number of threads and no version of torch. A change that breaks one
of these lines changes what everyone's training runs end in: say so in CHANGELOG, or mend it.
"""

import hashlib

import pytest
import torch

from gft.philox import NoiseKey, noise16
from gft.rules import Rounding, TopK, WeightStep
from gft.storage import Storage

ROWS, COLUMNS = 61, 75
LR = (0.6, 0.45, 0.3, 0.3, 0.2, 0.1)
LARGE = 1 << 28  # votes times this need int64, and their squares lose bits

# (storage, rule, factor of the votes, sha256 of the stored bytes after each step, flips of each step)
GOLDEN = [
    (Storage(2), Rounding(inertia=0.9), 1, "9eba2d36d6504da9b6999604ab587119", [251, 206, 228, 205, 192, 176]),
    (Storage(3), Rounding(inertia=0.5), 1, "f6b3308f2d4966fe8b4768f2248795aa", [1267, 758, 576, 485, 405, 242]),
    (Storage(4), Rounding(inertia=0.0), 1, "ed9f3813ed3e0124aa8f049e09bce19f", [893, 774, 570, 556, 401, 192]),
    (Storage(4), Rounding(), LARGE, "74a25eb86834de25e3e5ffa09f7214aa", [255, 239, 255, 214, 220, 180]),
    (Storage(5), Rounding(inertia=0.75), 1, "9072f1deef890b41e61be571c3c9e10d", [667, 518, 488, 413, 362, 322]),
    (Storage(8), Rounding(), 1, "b3d3e712ab840cc86811f5e3efeaeaaa", [583, 455, 311, 303, 201, 117]),
    (Storage(2, memory=False), Rounding(), 1, "e708a354c4c176ab62ef5eac00ce46b7", [260, 218, 216, 216, 205, 119]),
    (Storage(3, memory=False), Rounding(threshold=1.1, second_moment="running"), 1, "e7a619543734a313aaec3af64de6ecb0",
     [441, 381, 272, 266, 191, 89]),
    (Storage(4, memory=False), Rounding(threshold=0.0, second_moment="running"), 1, "3b808ffdf7640848f1dc29fc1d43dbe5",
     [569, 430, 254, 281, 165, 94]),
    (Storage(4, memory=False), Rounding(threshold=0.8), LARGE, "e8e2ec57b8ceaeb3ef50a302e9df477e",
     [487, 456, 356, 338, 218, 118]),
    (Storage(5, memory=False), Rounding(threshold=3.0), 1, "5e54df88c69078321e8030d27adb3079",
     [191, 197, 171, 191, 195, 182]),
    (Storage(8, memory=False), Rounding(threshold=0.7), 1, "be64a32ed1a87a9d2628b64775595272",
     [545, 463, 369, 333, 228, 106]),
    (Storage(2, memory=False), TopK(p_min=0.05), 1, "8849970c2b4b7fc606f4cb2ee3e2d35f", [182, 107, 98, 101, 86, 52]),
    (Storage(3, memory=False), TopK(p_min=0.3), 1, "537773634d254773b74a1391d5c45b84", [926, 521, 372, 340, 248, 134]),
    (Storage(4), TopK(p_min=0.01), LARGE, "d1f75b81de7f2d98bf1b26377193784e", [148, 121, 94, 117, 99, 78]),
]


def name_of(case: int) -> str:
    storage, rule, factor = GOLDEN[case][:3]
    settings = [f"{name}={value}" for name, value in rule.to_dict().items() if value and name != "name"]
    form = "memory" if storage.memory else "packed"
    return " ".join([type(rule).__name__, f"{storage.bits}bit {form}", *settings, *["large votes"][: factor > 1]])


def drawn(case: int, step: int) -> torch.Tensor:
    """Numbers 0..65535, one a weight."""
    return noise16(ROWS * COLUMNS, NoiseKey(case, step, stream=77)).view(ROWS, COLUMNS).to(torch.int64)


def start_of(case: int, storage: Storage) -> torch.Tensor:
    """Any stored value there is, fractions of levels included."""
    values = storage.lowest + drawn(case, 999) % (storage.limit - storage.lowest + 1)
    return storage.from_values(values.to(torch.int8))


def votes_of(case: int, step: int, factor: int) -> torch.Tensor:
    """Most small and some beyond 4 rms, rows and columns from small to large, and one of each without votes."""
    votes = drawn(case, step) - 32768
    for _ in range(2):
        votes = votes**3 >> 30
    votes >>= torch.arange(ROWS)[:, None] % 4 + torch.arange(COLUMNS) % 3
    votes[7], votes[:, 5] = 0, 0
    return votes.to(torch.int32) if factor == 1 else votes * factor


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", range(len(GOLDEN)), ids=name_of)
def test_six_steps_end_in_the_bytes_of_version_0_1_0(case, device):
    storage, rule, factor, digest, wanted_flips = GOLDEN[case]
    storage = rule.storage_for(storage)
    stored, second_moment = start_of(case, storage).to(device), None
    bytes_seen, flips = hashlib.sha256(), []
    for step, lr in enumerate(LR):
        weight = WeightStep(stored, votes_of(case, step, factor).to(device), bound=2**16 * factor, storage=storage,
                            scale=0.04, key=NoiseKey(1234567890123, step, stream=12, call=2), second_moment=second_moment)
        result, = rule.step([weight], lr)
        second_moment = result.second_moment
        bytes_seen.update(stored.cpu().numpy().tobytes())
        flips.append(int(result.flips))
    assert flips == wanted_flips
    assert bytes_seen.hexdigest()[:32] == digest
