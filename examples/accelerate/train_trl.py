"""Supervised fine-tuning with trl's SFTTrainer, by replica groups that may die at any time.

    ft-accelerate launch --config_file examples/accelerate/ft.yaml examples/accelerate/train_trl.py
    python examples/accelerate/train_trl.py       plain SFTTrainer: the mixin adds nothing then

What makes it fault tolerant, and the whole difference to a script of trl's own:

    -from trl import SFTTrainer
    +from ft_accelerate import FaultTolerantTrainerMixin
    +class SFTTrainer(FaultTolerantTrainerMixin, trl.SFTTrainer): ...

Kill any of the processes with `kill -9`: the others keep training, it is started again and goes on in the middle of the
epoch. At the end all print the same digest. trl's other trainers that are transformers Trainers with their own loss
(reward, DPO, KTO) are made in the same way; only this one was tried.

Nothing is downloaded (`pip install trl`): the model has random weights, the data are sums of small numbers in words.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import set_seed

from ft_accelerate import FaultTolerantTrainerMixin

NUMBERS = 40
WORDS = ["<pad>", "<eos>", "<unk>", "plus", "is", *(str(number) for number in range(2 * NUMBERS))]


class SFTTrainer(FaultTolerantTrainerMixin, trl.SFTTrainer):
    """trl's, whose training survives the loss of replica groups."""


def get_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def get_model(width: int) -> LlamaForCausalLM:
    """Random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip


def get_dataset() -> Dataset:
    """Prompts and what is to follow them."""
    pairs = [(a, b) for a in range(NUMBERS) for b in range(NUMBERS)]
    return Dataset.from_list([{"prompt": f"{a} plus {b} is", "completion": f" {a + b}"} for a, b in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", default="sums", help="for checkpoints")
    parser.add_argument("--save_steps", type=int, default=250)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, also where there is a GPU")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("ft_accelerate").setLevel(logging.INFO)
    logging.getLogger("ft_core").setLevel(logging.INFO)
    torch.set_num_threads(1)
    set_seed(args.seed)
    trainer = SFTTrainer(
        model=get_model(args.width),
        args=trl.SFTConfig(
            output_dir=args.dir,
            max_steps=args.steps,
            max_length=16,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            logging_steps=10,
            save_steps=args.save_steps,
            save_total_limit=2,
            seed=args.seed,
            report_to=[],
            disable_tqdm=True,
            use_cpu=args.cpu,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=torch.accelerator.is_available(),
        ),
        train_dataset=get_dataset(),
        processing_class=get_tokenizer(),
    )
    trainer.train()
    state = trainer.model.state_dict().values()
    digest = hashlib.sha256(b"".join(value.cpu().contiguous().numpy().tobytes() for value in state)).hexdigest()[:16]
    print(f"done: pid {os.getpid()}, step {trainer.state.global_step}, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
