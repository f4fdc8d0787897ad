"""The first five minutes: three networks on embedded data, trained side by side."""

import time
from pathlib import Path
from typing import Any

from gft.lab import report, train
from gft.lab.display import say, show, watching
from gft.lab.recipes import RECIPES
from gft.lab.records import write_json
from gft.lab.stopping import Stopped

RECIPE_NAMES = ("digits-fp", "digits-hybrid-4bit", "digits-quantized-2bit")


def demo(out: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Train full-precision AdamW, a 4-bit hybrid and a 2-bit network; write curves.png and result.json into `out`."""
    out = out / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    say("Training on 1,200 handwritten digits of 8×8 pixels. An integer weight has 4 or 2\n"
        "bits of level and 4 or 6 of vote memory, no float copy and no optimizer state.\n")
    runs = {name: train.training(RECIPES[name], out / name, seed=seed, device="cpu") for name in RECIPE_NAMES}
    results: dict[str, dict[str, Any]] = {}
    with watching() as shown:
        for name in RECIPE_NAMES:
            shown.add(name, RECIPES[name].schedule.steps)
        while len(results) < len(runs):
            for name, run in runs.items():
                try:
                    progress = next(run)
                except StopIteration:
                    continue
                except Stopped as stop:  # nothing goes on with a demonstration
                    raise Stopped(stop.number) from None
                shown.show(name, progress)
                if progress.result is not None:
                    results[name] = progress.result
    ordered = [results[name] for name in RECIPE_NAMES]
    show(report.demo_table(ordered))
    report.plot_curves({RECIPES[name].row: [report.validation_curve(out / name)] for name in RECIPE_NAMES},
                       "Digits", "accuracy", [out / "curves.png"])
    write_json(out / "result.json", ordered)
    say(f"Curves       {out / 'curves.png'}\nNumbers      {out / 'result.json'}\n"
        f"Look closer  gft eval {out / RECIPE_NAMES[2]}\n"
        "Next         gft recipes; gft train mnist-dnn-hybrid-4bit")
    return ordered
