"""Energy and accounting: what the paper estimates, what it leaves out, and joules as a machine's own counter has them.

    estimate.py   updates, bits, joules of the optimizer step as the paper counts them; and of the products as well
    paper.py      every number of those columns in the paper's tables, held against ours, with the paper's slips
    networks.py   the recipes' networks, counted
    meter.py      counters of a GPU (NVML) and a CPU (RAPL), windows around training, idle power taken off
    sheets.py     numbers as tables
    table.py      `gft energy table`: all estimates
    trials.py     `gft energy measure`: recipes trained inside windows

docs/energy.md explains.
"""

from gft.lab.energy.estimate import (
    MOVED_SHARE,
    NODES,
    OPERATIONS,
    PICOJOULE,
    Joules,
    Product,
    adamw_step_pj,
    bits_total,
    energy_estimate_j,
    gft_step_pj,
    moved_share,
    orthogonalize_j,
    products,
    rule_extras_j,
    step_energy,
    updates_estimated,
)
from gft.lab.energy.meter import Counter, NotMeasurable, Reading, find_counters, idle_power, mean_std, measure, measure_steps

__all__ = [
    "MOVED_SHARE",
    "NODES",
    "OPERATIONS",
    "PICOJOULE",
    "Counter",
    "Joules",
    "NotMeasurable",
    "Product",
    "Reading",
    "adamw_step_pj",
    "bits_total",
    "energy_estimate_j",
    "find_counters",
    "gft_step_pj",
    "idle_power",
    "mean_std",
    "measure",
    "measure_steps",
    "moved_share",
    "orthogonalize_j",
    "products",
    "rule_extras_j",
    "step_energy",
    "updates_estimated",
]
