"""Trained models for other runtimes. Each target is a module of its own, imported when it is used.

    gguf         llama.cpp: ternary weights as TQ2_0, TQ1_0 or Q2_0, 3 and 4 bits as Q4_0; which models it computes the same
                 (gguf_architectures), bytes of a block (gguf_blocks), tokenizers (gguf_vocabulary, gguf_sentencepiece)
    onnx         onnxruntime and its kin: integer weights as MatMulNBits or DequantizeLinear
    program      torch.export: a .pt2 that runs without gft
    compressed   transformers: compressed-tensors, pack-quantized
    weights      what they share: levels and scales of a layer, a model with other layers in the place of its own
"""
