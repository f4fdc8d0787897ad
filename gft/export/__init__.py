"""Trained models for other runtimes. Each target is a module of its own, imported when it is used.

    onnx         onnxruntime and its kin: integer weights as MatMulNBits or DequantizeLinear
    program      torch.export: a .pt2 that runs without gft
    compressed   transformers and vLLM: compressed-tensors, pack-quantized
    weights      what they share: levels and scales of a layer, a model with other layers in the place of its own
"""
