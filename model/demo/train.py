"""Makes `weights/` from nothing: corpus, tokenizer, training, checkpoint. Run as `python -m millrace.model.demo.train`.

CPU only. The work folder keeps the tokenizer, the token ids and a checkpoint every few minutes; started again, the run
goes on from there. Needs torch, transformers and tokenizers. Neither serving nor the tests import this file.
"""

import argparse
import csv
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from . import WEIGHTS
from .corpus import END_OF_TEXT, IM_END, IM_START, PAD, documents
from .muon import Muon

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, PAD)  # ids 0 to 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. Everything that decides the weights, up to the order of floating-point sums."""

    seed: int = 1
    num_tokens: int = 10_000_000  # of training text
    num_steps: int = 3_600
    num_packed_steps: int = 3_600  # then each document has a row of its own; the committed weights end before that
    tokens_per_step: int = 2_304  # in rows of their own, padding included
    vocab_size: int = 2_048
    num_layers: int = 4
    hidden_size: int = 128
    intermediate_size: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2
    max_position_embeddings: int = 2_048
    learning_rate: float = 3e-3  # of AdamW: embeddings and norms
    matrix_learning_rate: float = 0.02  # of Muon: everything else
    decay_share: float = 0.25  # of the steps, at the end
    final_share: float = 0.02  # of the learning rate, at the last step
    num_warmup_steps: int = 40

    def rows(self, step: int) -> tuple[int, int]:
        """(rows, tokens a row) of each half of a packed step: mostly short, now and then the whole context."""
        if step % 32 == 31:
            return 1, 2_048
        if step % 16 == 7:
            return 1, 1_024
        return (2, 512) if step % 4 == 1 else (4, 256)

    def share_of_rate(self, step: int) -> float:
        """Up in a line, level, and down in a line over the last quarter.

        Until it goes down, the number of steps may still be changed, and the run ends as if it had been planned so.
        """
        up = (step + 1) / self.num_warmup_steps
        down = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return min(1.0, up, max(down, self.final_share))

    def resumes(self, saved: dict[str, object]) -> bool:
        """Whether a checkpoint of the configuration `saved` begins this run; the number of steps may differ."""
        return saved | {"num_steps": 0} == asdict(self) | {"num_steps": 0}


class Windows:
    """Rows of token ids: one begins with a document, as a prompt does, the next goes on where that one ended."""

    def __init__(self, token_ids: np.ndarray, starts: np.ndarray) -> None:
        self.token_ids = token_ids  # [N] u16, all documents in a line
        self.starts = starts  # [D] i64, where each document begins
        self.position = 0
        self.num_rows = 0

    def take(self, num_rows: int, length: int) -> torch.Tensor:
        """The next rows, i64 [num_rows, length]; from the beginning again when the text is used up."""
        return torch.from_numpy(np.stack([self._row(length) for _ in range(num_rows)]).astype(np.int64))

    def _row(self, length: int) -> np.ndarray:
        if self.num_rows % 2 == 0:
            following = np.searchsorted(self.starts, self.position)
            self.position = int(self.starts[following]) if following < len(self.starts) else len(self.token_ids)
        if self.position + length > len(self.token_ids):
            self.position = 0
        begin = self.position
        self.position += length
        self.num_rows += 1
        return self.token_ids[begin : begin + length]


class Documents:
    """Batches of documents of about one length, each document in its own row, padded at the right.

    A row sees nothing but its document, so whatever name stands before a token is a name of the same story. Meant
    against the mixing up of names; what it gains has not been measured yet.
    """

    def __init__(self, token_ids: np.ndarray, starts: np.ndarray, tokens_per_batch: int, seed: int) -> None:
        self.token_ids = token_ids  # [N] u16
        self.starts = starts  # [D] i64
        self.ends = np.minimum(np.append(starts[1:], len(token_ids)), starts + 2_048)  # [D] i64
        self.batches = self._group(tokens_per_batch, np.random.default_rng(seed))

    def take(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input ids, labels), i64 [rows, length]; the last documents first, as packed rows begin with the first."""
        batch = self.batches[-1 - index % len(self.batches)]
        length = int((self.ends[batch] - self.starts[batch]).max())
        rows = np.full((len(batch), length), SPECIAL_TOKENS.index(PAD), np.int64)
        labels = np.full((len(batch), length), -100, np.int64)
        for row, document in enumerate(batch):
            ids = self.token_ids[self.starts[document] : self.ends[document]]
            rows[row, : len(ids)] = labels[row, : len(ids)] = ids
        return torch.from_numpy(rows), torch.from_numpy(labels)

    def _group(self, tokens_per_batch: int, rng: np.random.Generator, num_sorted: int = 1_000) -> list[np.ndarray]:
        """Sorts each thousand documents by length, cuts them into batches, and shuffles the batches."""
        lengths = self.ends - self.starts
        batches: list[np.ndarray] = []
        for first in range(0, len(lengths), num_sorted):
            order = first + np.argsort(lengths[first : first + num_sorted], kind="stable")[::-1]
            group: list[np.ndarray] = []
            while len(order):
                num_rows = max(1, tokens_per_batch // int(lengths[order[0]]))  # the longest comes first
                group.append(order[:num_rows])
                order = order[num_rows:]
            batches.extend(group[i] for i in rng.permutation(len(group)))
        return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "millrace-demo")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--num-steps", type=int, default=TrainConfig().num_steps)
    parser.add_argument("--num-threads", type=int, choices=(1, 2), default=2, help="1 on a machine that others use too")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(num_steps=args.num_steps)
    tokenizer = train_tokenizer(config, args.work_dir / "tokenizer.json")
    text = encode_corpus(config, tokenizer, args.work_dir / "corpus.npz")
    model, curve, seconds = train(config, text, args.work_dir, args.num_threads)
    write_weights(config, model, tokenizer, args.out)
    with (args.out.parent / "loss.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("step", "tokens", "loss"), *curve])
    print(
        json.dumps(
            {"parameters": model.num_parameters(), "training_seconds": round(seconds), "final_loss": curve[-1][2]}
        )
    )


def train_tokenizer(config: TrainConfig, path: Path) -> Tokenizer:
    """Byte-level BPE over the first tenth of the text, or the one already at `path`."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(documents(config.seed), 12_000), trainer)
    tokenizer.save(str(path))
    return tokenizer


def encode_corpus(config: TrainConfig, tokenizer: Tokenizer, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(token ids [N] u16, document starts [D] i64): whole documents until there are `num_tokens`."""
    if not path.exists():
        pieces, starts, num_tokens = [], [], 0
        for batch in _batches(documents(config.seed), 2_000):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                pieces.append(np.array(encoding.ids, np.uint16))
                starts.append(num_tokens)
                num_tokens += len(encoding.ids)
            if num_tokens >= config.num_tokens:
                break
        np.savez(path, token_ids=np.concatenate(pieces), starts=np.array(starts, np.int64))
    with np.load(path) as arrays:
        token_ids, starts_array = arrays["token_ids"], arrays["starts"]
    print(f"corpus: {len(token_ids):,} tokens in {len(starts_array):,} documents", flush=True)
    return token_ids, starts_array


def _batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(itertools.islice(texts, size)):
        yield batch


def make_model(config: TrainConfig) -> LlamaForCausalLM:
    """Random weights from the seed; what a layer adds to its input begins at zero."""
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(IM_END),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
    )
    model = LlamaForCausalLM(llama)
    generator = torch.Generator().manual_seed(config.seed)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
        elif weight.ndim == 2:
            std = 0.04 if "embed_tokens" in name else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, std=std, generator=generator)
    return model


def train(
    config: TrainConfig, text: tuple[np.ndarray, np.ndarray], work_dir: Path, num_threads: int
) -> tuple[LlamaForCausalLM, list[tuple[int, int, float]], float]:
    """(model, loss curve, seconds of all starts together). Curve: step, tokens seen, mean loss since the last."""
    torch.set_num_threads(1)
    windows, documents_apart = Windows(*text), Documents(*text, config.tokens_per_step, config.seed)
    model = make_model(config)
    pool = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed_tokens" in name]
    adamw = torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizers = [adamw, Muon(matrices, config.matrix_learning_rate, pool)]
    checkpoint = work_dir / "checkpoint.pt"
    first_step, seconds, num_tokens, curve = 0, 0.0, 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if not config.resumes(state["config"]):
            raise SystemExit(f"{checkpoint} is of another configuration; delete it, or pass another --work-dir")
        model.load_state_dict(state["model"])
        for optimizer, saved_optimizer in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved_optimizer)
        first_step, seconds, curve = state["step"], state["seconds"], state["curve"]
        num_tokens, windows.position, windows.num_rows = state["tokens"], state["position"], state["rows"]
    losses: list[float] = []
    began = saved = time.monotonic()
    for step in range(first_step, config.num_steps):
        rates = (config.learning_rate, config.matrix_learning_rate)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * config.share_of_rate(step)
        num_rows, length = config.rows(step)
        if step < config.num_packed_steps or length > 512:
            rows = labels = windows.take(2 * num_rows, length)
        else:
            rows, labels = documents_apart.take(step - config.num_packed_steps)
        parts = list(zip(rows.chunk(num_threads), labels.chunk(num_threads), strict=True))
        losses.append(_step(model, optimizers, parts, pool))
        num_tokens += int((labels >= 0).sum())
        if (step + 1) % 20 and step + 1 != config.num_steps:
            continue
        now = time.monotonic()
        curve.append((step + 1, num_tokens, round(sum(losses) / len(losses), 4)))
        losses = []
        pace = (now - began) / (step + 1 - first_step)
        print(f"step {step + 1} loss {curve[-1][2]:.4f} {pace:.3f} s/step", flush=True)
        if now - saved > 120 or step + 1 == config.num_steps:
            saved = now
            state = {"config": asdict(config), "model": model.state_dict()}
            state |= {"optimizers": [o.state_dict() for o in optimizers], "step": step + 1, "curve": curve}
            state |= {"seconds": seconds + now - began, "tokens": num_tokens}
            _save(checkpoint, state | {"position": windows.position, "rows": windows.num_rows})
    pool.shutdown()
    return model, curve, seconds + time.monotonic() - began


def _step(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    pool: Executor,
) -> float:
    """One update; the mean loss over `parts`, (input ids, labels) of about equal size.

    Each thread does one part on one core. They meet once a step, not in each operation as the threads inside an
    operation do, which wait for each other when other processes are on the cores too.
    """
    parameters = list(model.parameters())

    def work(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = model(input_ids=part[0], labels=part[1]).loss
        return loss.item(), torch.autograd.grad(loss, parameters)

    losses, gradients = zip(*pool.map(work, parts), strict=True)
    for parameter, *shares in zip(parameters, *gradients, strict=True):
        parameter.grad = torch.stack(shares).mean(0)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(sum(losses) / len(losses))


def _save(path: Path, state: dict[str, object]) -> None:
    """Whole or not at all: written beside and renamed."""
    beside = path.with_suffix(".new")
    torch.save(state, beside)
    os.replace(beside, path)


def write_weights(config: TrainConfig, model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """A checkpoint folder as the Hub has them; weights in bfloat16, the tied output matrix stored once."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.to(torch.bfloat16).contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    end, pad = SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(PAD)
    _write_json(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
            "head_dim": config.hidden_size // config.num_heads,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position_embeddings,
            "mlp_bias": False,
            "num_attention_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "num_key_value_heads": config.num_kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": config.vocab_size,
        },
    )
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": PAD,
            "unk_token": None,
            "additional_special_tokens": [IM_START, END_OF_TEXT],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        out / "generation_config.json", {"eos_token_id": [end, SPECIAL_TOKENS.index(END_OF_TEXT)], "pad_token_id": pad}
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
