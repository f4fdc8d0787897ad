"""What a compiled graph reads from memory about the layer whose votes it prepares.

A graph keeps the arguments of its kernels, so all that changes from step to step lies in tensors that stay where they are:
the factors of x and grad_output, the count of steps, which backward pass of a step it is. In eager mode Python says these
things with each launch.
"""

import torch
from torch import Tensor

SCALES = ("x_rms", "grad_rms")


class Uses:
    """How many backward passes the layers on one device have had since the last step, as the next forward is to know it.

    One number for all of them: the first layer to have cast its votes says it. Backward itself does not read it but what
    forward has read, so that x and grad_output of one pass draw numbers of one call.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._written = 0

    def at_least(self, backwards: int) -> None:
        if self._written < backwards:
            self._written = backwards
            self.count.fill_(backwards)

    def restart(self) -> None:
        if self._written:
            self._written = 0
            self.count.zero_()


class Panel:
    """Of one layer."""

    def __init__(self, seed: int, number: int, lengths: tuple[int, int], uses: Uses) -> None:
        device = uses.count.device
        self.uses = uses
        self.not_finite = torch.zeros((), dtype=torch.int64, device=device)  # values of grad_output that were NaN or inf
        self.key = torch.tensor([0, number, self.not_finite.data_ptr()], device=device)
        self.x_factors, self.grad_factors = (torch.zeros(length, device=device) for length in lengths)  # 0: not known yet
        self.set_seed(seed)

    def set_seed(self, seed: int) -> None:
        self.seed = seed
        self.key[0] = seed - (seed >> 63 << 64)  # the same bits

    def factors_of(self, which: str) -> Tensor:
        return self.x_factors if which == "x_rms" else self.grad_factors
