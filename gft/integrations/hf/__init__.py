"""Hugging Face transformers, version 5: import this module once, and quantized models are at home there.

    model.save_pretrained(folder)                                     integer weights; config.json says quant_method "gft"
    AutoModelForCausalLM.from_pretrained(folder)                      the same logits, bit for bit; trains on
    AutoModelForCausalLM.from_pretrained(name, quantization_config=hf.GftConfig(bits=2))     quantized while it is loaded
    Trainer(model, args, optimizer_cls_and_kwargs=hf.optimizer_cls_and_kwargs(args))         GFT and AdamW
    trainer.add_callback(hf.Statistics(trainer))                      flips, zeros, bytes in Trainer's own log
    hf.save(model, folder)                                            packed, with a model card; ready to be uploaded

`gft.quantize_` prepares a transformers model for all of this by itself.
"""

from gft.integrations.hf.folder import save
from gft.integrations.hf.quantizer import GftConfig, GftQuantizer, attach
from gft.integrations.hf.training import HybridFactory, Statistics, optimizer_cls_and_kwargs

__all__ = ["GftConfig", "GftQuantizer", "HybridFactory", "Statistics", "attach", "optimizer_cls_and_kwargs", "save"]
