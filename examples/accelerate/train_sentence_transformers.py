"""Sentence embeddings with SentenceTransformerTrainer, trained by replica groups that may die at any time.

    ft-accelerate launch --config_file examples/accelerate/ft.yaml examples/accelerate/train_sentence_transformers.py
    python examples/accelerate/train_sentence_transformers.py       the plain trainer: the mixin adds nothing then

What makes it fault tolerant, and the whole difference to a script of sentence-transformers' own:

    -from sentence_transformers import SentenceTransformerTrainer
    +from ft_accelerate import FaultTolerantTrainerMixin
    +class SentenceTransformerTrainer(FaultTolerantTrainerMixin, sentence_transformers.SentenceTransformerTrainer): ...

Kill any of the processes with `kill -9`: the others keep training, it is started again and goes on in the middle of the
epoch. At the end all print the same digest.

Nothing is downloaded (`pip install sentence-transformers datasets`): the model is a BERT with two layers and random
weights, the data are pairs of sentences about the same thing.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import tempfile

import sentence_transformers
import torch
from datasets import Dataset
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from transformers.trainer_utils import set_seed

from ft_accelerate import FaultTolerantTrainerMixin

THINGS = [f"thing{number}" for number in range(200)]
WORDS = ["[PAD]", "[UNK]", "where", "is", "the", "here", "you", "find", *THINGS]


class SentenceTransformerTrainer(FaultTolerantTrainerMixin, sentence_transformers.SentenceTransformerTrainer):
    """sentence-transformers', whose training survives the loss of replica groups."""


def get_model(width: int) -> sentence_transformers.SentenceTransformer:
    """Random weights. The class reads its transformer from a folder."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=2 * width, max_position_embeddings=32, hidden_dropout_prob=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
        ).save_pretrained(folder)
        transformer = Transformer(folder)
    return sentence_transformers.SentenceTransformer(modules=[transformer, Pooling(width)])


def get_dataset() -> Dataset:
    """Questions and their answers."""
    return Dataset.from_dict(
        {
            "question": [f"where is the {thing}" for thing in THINGS],
            "answer": [f"here you find the {thing}" for thing in THINGS],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", default="things", help="for checkpoints")
    parser.add_argument("--save_steps", type=int, default=250)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, also where there is a GPU")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("ft_accelerate").setLevel(logging.INFO)
    logging.getLogger("ft_core").setLevel(logging.INFO)
    torch.set_num_threads(1)
    set_seed(args.seed)
    model = get_model(args.width)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=sentence_transformers.SentenceTransformerTrainingArguments(
            output_dir=args.dir,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            logging_steps=10,
            save_steps=args.save_steps,
            save_total_limit=2,
            seed=args.seed,
            report_to=[],
            disable_tqdm=True,
            use_cpu=args.cpu,
            dataloader_pin_memory=torch.accelerator.is_available(),
        ),
        train_dataset=get_dataset(),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    state = model.state_dict().values()
    digest = hashlib.sha256(b"".join(value.cpu().contiguous().numpy().tobytes() for value in state)).hexdigest()[:16]
    print(f"done: pid {os.getpid()}, step {trainer.state.global_step}, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
