"""Pretrain a small Llama with 2-bit weights by transformers' Trainer, save it, and load it again.

    python examples/hf_trainer.py --steps 200                             a tiny model, which reads this file byte by byte
    python examples/hf_trainer.py --steps 2000 --text book.txt            another text
    python examples/hf_trainer.py --model NAME_OR_FOLDER --text book.txt  fine-tune a model of the hub by its own tokenizer
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gft
from gft.integrations import hf

CONTEXT = 64


class Windows(torch.utils.data.Dataset):
    """Pieces of one long text. Trainer's models shift the labels themselves."""

    def __init__(self, tokens: list[int]) -> None:
        self.windows = torch.tensor(tokens).unfold(0, CONTEXT, CONTEXT // 4)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--model", help="start from this model's weights, on the scales that lose least of them")
    parser.add_argument("--out", default="hf-model", help="the folder to save to")
    settings = parser.parse_args()
    torch.manual_seed(0)

    text = settings.text.read_text()
    if settings.model:
        model = AutoModelForCausalLM.from_pretrained(settings.model)
        tokens = AutoTokenizer.from_pretrained(settings.model)(text)["input_ids"]
    else:
        model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256,
                                             num_attention_heads=4, max_position_embeddings=CONTEXT))
        tokens = list(text.encode())

    # Attention and MLPs become integers; embeddings, norms and the head stay float.
    gft.quantize_(model, bits=2, init="fit" if settings.model else "keep", filter_fn=lambda module, name: ".layers." in name)
    args = TrainingArguments(settings.out, max_steps=settings.steps, per_device_train_batch_size=8, learning_rate=3e-3,
                             logging_steps=max(settings.steps // 4, 1), save_strategy="no", report_to="none",
                             disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(), weight_decay=0.1)
    rate = 0.02 if settings.model else 0.2  # of the integers; a trained model takes smaller steps
    trainer = Trainer(model=model, args=args, train_dataset=Windows(tokens),
                      optimizer_cls_and_kwargs=hf.optimizer_cls_and_kwargs(args, lr=rate))
    trainer.add_callback(hf.Statistics(trainer))  # flips, zeros and bytes, wherever report_to sends the log
    trainer.train()

    model.save_pretrained(settings.out)
    loaded = AutoModelForCausalLM.from_pretrained(settings.out).to(model.device)  # needs the import of gft.integrations.hf
    batch = torch.tensor([tokens[:CONTEXT]], device=model.device)
    with torch.no_grad():
        same = torch.equal(model.eval()(input_ids=batch).logits, loaded.eval()(input_ids=batch).logits)
    print(f"loaded from {settings.out}/ with the same logits: {same}")


if __name__ == "__main__":
    main()
