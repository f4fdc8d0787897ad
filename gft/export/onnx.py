"""ONNX: a quantized model as one file that onnxruntime runs, with its weights as 2-, 4- or 8-bit integers.

    to_onnx(model, "model.onnx", (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))

A linear layer becomes com.microsoft.MatMulNBits, which multiplies by packed weights without unpacking them first; any other
layer, and with standard=True the linear ones, DequantizeLinear on an INT2, INT4 or INT8 weight with the float operator after
it. Levels of 3 bits take 4, those of 5 to 7 bits 8.

`torch.onnx.export(model, …, dynamo=True)` works, too: its graph unpacks the weight, as it is stored, by standard operators,
and a runtime does that once, when it loads the file.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gft.errors import UsageError, install_hint
from gft.export.weights import levels_and_scales, with_layers_replaced
from gft.files import written_atomically
from gft.layers import QuantLayer, QuantLinear
from gft.storage import field_bits, pack_fields

OPSET_OF_WIDTH = {2: 25, 4: 21, 8: 21}  # the first that has INT2, INT4, and blocks of scales
# Columns that share a scale in MatMulNBits. onnxruntime takes powers of two up to 256, but rounds x (accuracy_level=4) with
# weights of 2 bits up to 128 only.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128
LARGEST_FILE = 2**31 - 2**20  # of protobuf; beyond, the weights go to a file beside it
NARROW, EXPAND = "gft.narrow", "gft.expand"  # marks of a node: its weight's bits; how often its one scale is repeated


def to_onnx(model: nn.Module, path: str | Path, example_inputs: tuple[Any, ...], *,
            example_kwargs: dict[str, Any] | None = None, dynamic_shapes: Any = None, standard: bool = False,
            accuracy_level: int = 1, **options: Any) -> Path:
    """Export the model for inference to an ONNX file; returns the path.

    example_inputs, example_kwargs, dynamic_shapes: torch.onnx.export's. A size not named dynamic is fixed in the file.
    standard: True uses the operators of the ONNX standard alone, for runtimes other than onnxruntime.
    accuracy_level: onnxruntime's own setting of MatMulNBits. 1: float32 products. 4: it rounds x to 8 bits, which is several
        times faster and moves a product by about a hundredth of its largest value.
    options: further arguments of torch.onnx.export (input_names, output_names, opset_version …).

    The model is left as it is, in whatever mode.
    """
    _need_onnx()
    if accuracy_level not in range(5):
        raise UsageError(f"accuracy_level={accuracy_level}: onnxruntime knows 0 to 4; choose 1 for float32, 4 for speed")
    replaced = with_layers_replaced(model, lambda layer: _stand_in(layer, standard, accuracy_level))
    widths = [module.width for module in replaced.modules() if isinstance(module, Dequantized)]
    opset = max((OPSET_OF_WIDTH[width] for width in widths), default=OPSET_OF_WIDTH[4])
    if options.setdefault("opset_version", opset) < opset:
        raise UsageError(f"opset_version={options['opset_version']}: these weights need opset {opset}; leave it out")
    with torch.no_grad():
        program = torch.onnx.export(replaced, example_inputs, kwargs=example_kwargs, dynamic_shapes=dynamic_shapes,
                                    **{"verbose": False, **options}, dynamo=True)
    assert program is not None
    graph = program.model.graph
    _finish(graph)
    if sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value) > LARGEST_FILE:
        program.save(path, external_data=True)
        return Path(path)
    with written_atomically(path) as unfinished:
        program.save(unfinished, external_data=False)
    return Path(path)


def _need_onnx() -> None:
    try:
        import onnxscript  # noqa: F401  brings onnx and onnx_ir
    except ImportError as error:
        raise UsageError(f"ONNX files are written with onnxscript; install it with: {install_hint('export')}") from error


def _stand_in(layer: QuantLayer, standard: bool, accuracy_level: int) -> nn.Module:
    if isinstance(layer, QuantLinear) and not standard:
        block = block_size(layer.columns, layer.group, field_bits(layer.bits))
        if block is not None:
            return PackedProduct(layer, block, accuracy_level)
    return Dequantized(layer)


def block_size(columns: int, group: int, width: int) -> int | None:
    """How many columns share a scale in MatMulNBits: what makes the weight and its scales smallest, as the last block of
    a row is filled up. A layer's own group must hold whole blocks; None where it cannot."""
    sizes = [1 << power for power in range(SMALLEST_BLOCK.bit_length() - 1, LARGEST_BLOCK.bit_length())]
    fitting = [size for size in sizes if group >= columns or group % size == 0]
    return min(fitting, key=lambda size: (math.ceil(columns / size) * (size * width // 8 + 4), -size), default=None)


class StandIn(nn.Module):
    """Stands in for a quantized layer while the model is traced, and answers for it."""

    def __init__(self, layer: QuantLayer) -> None:
        super().__init__()
        sizes = {name: value for name, value in vars(layer).items() if isinstance(value, (int, tuple)) and name[0] != "_"}
        self.__dict__.update(sizes)  # in_features and its kin, should the model ask
        self.source = (layer,)  # in a tuple: not a part of this module
        self.bias = layer.bias
        self.bias_shape = () if layer.bias is None else tuple(layer._shaped_bias().shape)

    @property
    def weight(self) -> Tensor:
        return self.source[0].weight

    def add_bias(self, y: Tensor) -> Tensor:
        if self.bias is None:
            return y
        return y + (self.bias if len(self.bias_shape) == 1 else self.bias.view(self.bias_shape)).to(y.dtype)


class PackedProduct(StandIn):
    """A linear layer as one node that multiplies by the packed weight."""

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: QuantLinear, block: int, accuracy_level: int) -> None:
        super().__init__(layer)
        levels, scales = levels_and_scales(layer)
        width, blocks = field_bits(layer.bits), math.ceil(layer.columns / block)
        levels = nn.functional.pad(levels, (0, blocks * block - layer.columns))
        packed = pack_fields(levels, width, 1 << width - 1)  # the operator's own zero point
        self.register_buffer("packed", packed.view(layer.rows, blocks, block * width // 8))
        self.marks = {}
        if layer.scale.numel() == 1:
            scales, self.marks = scales[:1, :1], {EXPAND: str(layer.rows * blocks)}
        else:
            scales = scales.repeat_interleave(math.ceil(layer.group / block), 1)[:, :blocks]
        self.register_buffer("scales", scales.to(layer.dtype).reshape(-1))
        self.attributes: dict[str, Any] = {"K": layer.columns, "N": layer.rows, "bits": width, "block_size": block,
                                           "accuracy_level": accuracy_level}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.onnx.ops.symbolic("com.microsoft::MatMulNBits", (x, self.packed, self.scales), self.attributes,
                                    dtype=x.dtype, shape=(*x.shape[:-1], self.attributes["N"]), version=1,
                                    metadata_props=self.marks)
        return self.add_bias(y)


class Dequantized(StandIn):
    """Any layer: its weight is made float by DequantizeLinear and multiplied as the layer does."""

    levels: Tensor
    scales: Tensor

    def __init__(self, layer: QuantLayer) -> None:
        super().__init__(layer)
        self.width = field_bits(layer.bits)
        levels, scales = levels_and_scales(layer)
        self.attributes: dict[str, Any] = {}
        if layer.scale.numel() == 1:
            scales = scales[0, 0]
        elif scales.shape[1] == 1:
            self.attributes, scales = {"axis": 0}, scales.view(-1)
        else:
            self.attributes = {"axis": 1, "block_size": layer.group}
        self.register_buffer("levels", levels)
        self.register_buffer("scales", scales.to(layer.dtype).clone())

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.onnx.ops.symbolic("DequantizeLinear", (self.levels, self.scales), self.attributes, dtype=x.dtype,
                                         shape=self.levels.shape, version=OPSET_OF_WIDTH[self.width],
                                         metadata_props={NARROW: str(self.width)})
        layer = self.source[0]
        return self.add_bias(layer.product(x, weight))


def _finish(graph: Any) -> None:
    """What torch's exporter cannot say, as it has neither tensors of 2 and 4 bits nor constants spread out when loaded."""
    import onnx_ir

    for node in graph.all_nodes():
        width, scales = int(node.metadata_props.get(NARROW, 8)), int(node.metadata_props.get(EXPAND, 1))
        node.metadata_props.clear()  # where in the model's source it came from: paths of this machine
        if width < 8:
            weight, kind = node.inputs[0], onnx_ir.DataType[f"INT{width}"]
            if weight.dtype != kind:  # a layer used twice has one weight
                levels = weight.const_value.numpy().astype(kind.numpy())
                weight.const_value = onnx_ir.tensor(levels, dtype=kind, name=weight.name)
                weight.dtype = kind
        if scales > 1:
            shape = onnx_ir.tensor([scales], dtype=onnx_ir.DataType.INT64, name=f"{node.outputs[0].name}_scales")
            value = onnx_ir.Value(name=shape.name, const_value=shape, type=onnx_ir.TensorType(shape.dtype),
                                  shape=onnx_ir.Shape([1]))
            node.graph.register_initializer(value)
            spread = onnx_ir.node("Expand", [node.inputs[2], value])
            node.graph.insert_before(node, spread)
            node.replace_input_with(2, spread.outputs[0])
