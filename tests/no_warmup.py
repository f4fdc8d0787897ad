"""Most tests take a few steps, in which the default warmup of 100 would move next to nothing: they go without, and so must
the processes they start."""

import gft.rules.rounding

DEFAULT = gft.rules.rounding.WARMUP
gft.rules.rounding.WARMUP = 0
