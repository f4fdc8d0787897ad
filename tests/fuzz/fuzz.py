"""Feeds damaged files and state_dicts to gft, as many as you like, and counts what becomes of them.

    python tests/fuzz/fuzz.py --inputs 1000000            shared out over all targets; `make fuzz`
    python tests/fuzz/fuzz.py --targets checkpoint --seed 7 --inputs 5000

An input is taken, or refused in one sentence while nothing has changed. Whatever else happens is printed with the number
that makes the same input again, and the exit status is 1.
"""

import argparse
import json
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))  # the gft that this file lies beside

from targets import TARGETS, quiet

SLOW = 5.0  # seconds of the processor; no damaged file may take longer, whatever else the machine does


def fuzz(name: str, inputs: int, seed: int) -> Counter[str]:
    """How many inputs of a target were taken, refused, or led to something else."""
    target, counts, shown = TARGETS[name](), Counter[str](), Counter[str]()
    for number in range(seed, seed + inputs):
        try:
            began = time.process_time()
            counts["refused" if target.feed(target.damaged(Random(number))) else "taken"] += 1
            if (took := time.process_time() - began) > SLOW:
                raise TimeoutError(f"took {took:.1f} s")
        except Exception as error:
            counts[type(error).__name__] += 1
            shown[type(error).__name__] += 1
            if shown[type(error).__name__] <= 3:
                where = "".join(traceback.format_tb(error.__traceback__)[-2:])
                print(f"{name}, seed {number}: {type(error).__name__}: {str(error)[:300]}\n{where}", file=sys.stderr)
            target = TARGETS[name]()  # whose state may have changed
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    options = parser.parse_args()
    quiet()
    findings = 0
    for name in options.targets:
        began = time.perf_counter()
        counts = fuzz(name, -(-options.inputs // len(options.targets)), options.seed)
        findings += sum(count for kind, count in counts.items() if kind not in ("taken", "refused"))
        print(json.dumps({"target": name, "inputs": sum(counts.values()), **counts,
                          "seconds": round(time.perf_counter() - began, 1),
                          "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}), flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
