"""Other people's trainers and model hubs. Nothing here is imported by `import gft`; import what you use:

    import gft.integrations.hf           Hugging Face: save_pretrained and from_pretrained, Trainer, a folder to publish
    import gft.integrations.lightning    Lightning: statistics in its log, right counts in its summary
    import gft.integrations.peft         LoRA adapters on quantized layers
"""
