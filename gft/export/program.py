"""torch.export: a quantized model as a `.pt2` that loads and runs without gft.

    to_pt2(model, "model.pt2", (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    y = torch.export.load("model.pt2").module()(x)

The file holds the packed levels, 0.25 B a weight at 2 bits and 0.5 B at 3 and 4, also where the model keeps memory; the
graph reads them out with torch's own operators at each call. `torch.export.export(model.eval(), …)` and
`torch.jit.trace(model.eval(), …)` give such graphs, too, over the weight as the model stores it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gft.export.weights import packed, with_layers_replaced
from gft.files import written_atomically


def to_pt2(model: nn.Module, path: str | Path, example_inputs: tuple[Any, ...], *,
           example_kwargs: dict[str, Any] | None = None, dynamic_shapes: Any = None) -> Path:
    """Export the model for inference and save it; returns the path.

    example_inputs, example_kwargs, dynamic_shapes: torch.export.export's. A size that is not named dynamic is fixed in the
    file. The model is left as it is, in whatever mode.
    """
    with torch.no_grad(), written_atomically(path) as unfinished:
        program = torch.export.export(with_layers_replaced(model, packed), example_inputs, example_kwargs,
                                      dynamic_shapes=dynamic_shapes)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # the paths of this machine, and more bytes than the graph itself
        with open(unfinished, "wb") as file:  # by its name torch would ask for another ending
            torch.export.save(program, file)
    return Path(path)
