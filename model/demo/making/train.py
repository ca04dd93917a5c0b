"""Makes `weights/` from scratch: corpus, tokenizer, training, checkpoint.

Run as `python -m millrace.model.demo.making.train`, on a CPU. The work folder holds the tokenizer, the token ids and a
checkpoint every few minutes, from which a restarted run continues. Needs torch, transformers and tokenizers. Neither
serving nor the tests import this file.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from .. import WEIGHTS
from .corpus import END_OF_TEXT, IM_END, IM_START, PAD, documents
from .muon import Muon

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, PAD)  # ids 0 to 3

Kept = dict[torch.nn.Parameter, tuple[slice, ...]]  # the part of a weight that training leaves as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. Everything that decides the weights, up to the order of floating-point sums."""

    seed: int = 1
    num_tokens: int = 9_000_000  # of training text
    num_steps: int = 2_400
    tokens_per_step: int = 4_096  # padding included
    copying_share: float = 0.04  # of steps
    vocab_size: int = 2_048
    num_layers: int = 4
    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    max_position_embeddings: int = 2_048
    rope_theta: float = 100_000.0
    learning_rate: float = 2e-3  # of AdamW: embeddings and norms
    matrix_learning_rate: float = 0.012  # of Muon: everything else
    decay_share: float = 0.3  # of the steps, at the end
    final_share: float = 0.02  # of the learning rate, at the last step
    num_warmup_steps: int = 100

    def share_of_rate(self, step: int) -> float:
        """The learning rate's factor: a linear warm-up, a plateau, and a linear decay at the end.

        Before the decay begins, the number of steps may be changed without a trace.
        """
        up = (step + 1) / self.num_warmup_steps
        down = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return min(1.0, up, max(down, self.final_share))

    def resumes(self, saved: dict[str, object]) -> bool:
        """Whether a checkpoint of the configuration `saved` begins this run; the number of steps may differ."""
        return _as_json(saved) | {"num_steps": 0} == _as_json(asdict(self)) | {"num_steps": 0}


class DocumentBatches:
    """Batches of documents of about one length, each document in its own row, padded at the right.

    A row sees only its own document, so every name before a token is from the same story.
    """

    def __init__(self, token_ids: np.ndarray, starts: np.ndarray, tokens_per_batch: int, seed: int) -> None:
        self.token_ids = token_ids  # [N] u16
        self.starts = starts  # [D] i64
        self.ends = np.minimum(np.append(starts[1:], len(token_ids)), starts + 2_048)  # [D] i64
        self.batches = self._group(tokens_per_batch, np.random.default_rng(seed))

    def take(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input ids, labels), i64 [rows, length]."""
        batch = self.batches[index % len(self.batches)]
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


def copying(config: TrainConfig, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of random tokens, each a repeated piece: (input ids, labels), i64 [rows, 256].

    The only way to predict the next token is to find its earlier occurrence. A model that learns this also looks up
    names; on stories alone it did not after 7 M tokens.
    """
    rows = rng.integers(len(SPECIAL_TOKENS), config.vocab_size, (config.tokens_per_step // 256, 256))
    labels = np.full_like(rows, -100)
    for row, label in zip(rows, labels, strict=True):
        period = int(rng.integers(4, 96))
        row[:] = np.resize(row[:period], len(row))
        label[period:] = row[period:]
    return torch.from_numpy(rows), torch.from_numpy(labels)


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


def make_model(config: TrainConfig) -> tuple[LlamaForCausalLM, Kept]:
    """Random weights from the seed; the output of each layer starts at zero, except for copying heads."""
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
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
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
    return model, _plant_copying(config, model, generator)


@torch.no_grad()
def _plant_copying(config: TrainConfig, model: LlamaForCausalLM, generator: torch.Generator) -> Kept:
    """Initialises some heads as copiers, which do not form from random weights within the budget of tokens.

    Three heads are the circuit that looks up what followed an earlier occurrence of a token (Olsson et al., 2022). In
    layer 0 a head attends to the previous token, by its distance, and writes a code of it. In layers 1 and 2 one head
    each finds the position whose code is that of the current token, and copies the token there. In each layer after the
    first, two more heads copy the token they attend to, and learn where to attend. The weights that make them copiers
    get no gradient.
    """
    size, half = config.hidden_size // config.num_heads, config.hidden_size // config.num_heads // 2
    basis = torch.zeros(config.hidden_size - 1, config.hidden_size)  # orthonormal rows, none of which reads column 0
    noise = torch.randn(config.hidden_size - 1, config.hidden_size - 1, generator=generator)
    basis[:, 1:] = torch.linalg.qr(noise)[0]
    code, home, *contents = torch.split(basis[: 4 * (size - 1)], size - 1)  # [size - 1, hidden] each
    embedding = model.model.embed_tokens.weight
    embedding -= embedding @ home.T @ home  # room for the codes
    embedding[:, 0] = 0.2  # the same for all tokens: read by heads that attend by position
    kept: Kept = {embedding: (slice(None), slice(1))}
    layers = [layer.self_attn for layer in model.model.layers]
    angle = config.rope_theta ** (-torch.arange(half) / half)  # of the pair (i, i + half), a token
    is_fast = (torch.arange(half) < 3).float()  # pairs that distinguish a distance of one token from two
    first = layers[0]
    for projection, cosines, sines in (
        (first.q_proj, is_fast * angle.cos(), -is_fast * angle.sin()),
        (first.k_proj, is_fast, torch.zeros(half)),
    ):
        projection.weight[:size] = 0.0
        projection.weight[:size, 0] = 2.2 * torch.cat((cosines, sines))
    first.v_proj.weight[: size - 1] = code
    first.o_proj.weight[:, : size - 1] = 0.12 * home.T
    slow = torch.cat((torch.arange(half // 2, half), torch.arange(half + half // 2, size)))  # pairs that hardly rotate
    for layer, content in zip(layers[1:], contents, strict=False):
        for projection, read in ((layer.q_proj, code), (layer.k_proj, home)):
            projection.weight[:size] = 0.0
            projection.weight[slow] = 2.5 * read[: len(slow)]
        layer.v_proj.weight[: size - 1] = content
        layer.o_proj.weight[:, : size - 1] = 0.3 * content.T
    for layer in layers[:3]:
        kept |= {projection.weight: (slice(size),) for projection in (layer.q_proj, layer.k_proj)}
    kept |= {first.v_proj.weight: (slice(size),), first.o_proj.weight: (slice(None), slice(size))}
    for layer, content in zip(layers[1:], (*contents, code), strict=True):
        layer.v_proj.weight[size : 2 * size - 1] = content
        layer.v_proj.weight[2 * size - 1] = 0.0
        for head in (2, 3):
            layer.o_proj.weight[:, head * size : (head + 1) * size - 1] = 0.5 * content.T
            layer.o_proj.weight[:, (head + 1) * size - 1] = 0.0
        kept |= {layer.v_proj.weight: (slice(None),), layer.o_proj.weight: (slice(None), slice(2 * size, None))}
    return kept


def train(
    config: TrainConfig, text: tuple[np.ndarray, np.ndarray], work_dir: Path, num_threads: int
) -> tuple[LlamaForCausalLM, list[tuple[int, int, float]], float]:
    """(model, loss curve, seconds of all starts together). Curve: step, tokens seen, mean loss since the last."""
    torch.set_num_threads(1)
    documents_apart = DocumentBatches(*text, config.tokens_per_step, config.seed)
    model, kept = make_model(config)
    pool = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed_tokens" in name]
    adamw = torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizers = [adamw, Muon(matrices, config.matrix_learning_rate, pool)]
    done = TrainProgress.load(work_dir, config, model, optimizers)
    losses: list[float] = []
    began = saved = time.monotonic()
    first_step, seconds = done.step, done.seconds
    for step in range(first_step, config.num_steps):
        rates = (config.learning_rate, config.matrix_learning_rate)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * config.share_of_rate(step)
        rng = np.random.default_rng((config.seed, step))
        is_copying = rng.random() < config.copying_share
        rows, labels = copying(config, rng) if is_copying else documents_apart.take(step)
        parts = list(zip(rows.chunk(num_threads), labels.chunk(num_threads), strict=True))
        loss = _step(model, kept, optimizers, parts, pool)
        if is_copying:
            print(f"step {step + 1} copying loss {loss:.3f}", flush=True)
        else:
            losses.append(loss)
            done.num_tokens += int((labels >= 0).sum())
        if (step + 1) % 20 and step + 1 != config.num_steps:
            continue
        now = time.monotonic()
        done.step, done.seconds = step + 1, seconds + now - began
        done.curve.append((step + 1, done.num_tokens, round(sum(losses) / max(len(losses), 1), 4)))
        losses = []
        pace = (now - began) / (step + 1 - first_step)
        print(f"step {step + 1} loss {done.curve[-1][2]:.4f} {pace:.3f} s/step", flush=True)
        if now - saved > 120 or step + 1 == config.num_steps:
            saved = now
            done.save(work_dir, config, model, optimizers)
    pool.shutdown()
    return model, done.curve, done.seconds


@dataclass(slots=True)
class TrainProgress:
    """The progress of a run: the part of a checkpoint besides the tensors."""

    step: int = 0
    num_tokens: int = 0  # of text
    seconds: float = 0.0
    curve: list[tuple[int, int, float]] = field(default_factory=list)

    @classmethod
    def load(
        cls, work_dir: Path, config: TrainConfig, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
    ) -> "TrainProgress":
        """The run that `work_dir` holds, if any: fills the model and the optimizers."""
        path = work_dir / "checkpoint.safetensors"
        if not path.exists():
            return cls()
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            if not config.resumes(state["config"]):
                raise SystemExit(f"{path} is of another configuration; delete it, or pass another --work-dir")
            saved = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no mapping
        for name, parameter in model.named_parameters():
            parameter.data.copy_(saved.pop(f"model/{name}"))
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                prefix = f"{names[parameter]}/"
                found = {key: value for key, value in saved.items() if key.startswith(prefix)}
                optimizer.state[parameter] = {key.removeprefix(prefix): value for key, value in found.items()}
        curve = [(int(step), int(tokens), float(loss)) for step, tokens, loss in state["curve"]]
        return cls(state["step"], state["num_tokens"], state["seconds"], curve)

    def save(
        self, work_dir: Path, config: TrainConfig, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Writes the checkpoint atomically: to another file, which is then renamed."""
        tensors = {f"model/{name}": parameter.data for name, parameter in model.named_parameters()}
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                tensors |= {f"{names[parameter]}/{key}": value for key, value in state.items()}
        beside = work_dir / "checkpoint.new"
        save_file(tensors, beside, {"state": json.dumps(asdict(self) | {"config": asdict(config)})})
        os.replace(beside, work_dir / "checkpoint.safetensors")


def _step(
    model: LlamaForCausalLM,
    kept: Kept,
    optimizers: list[torch.optim.Optimizer],
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    pool: Executor,
) -> float:
    """One update; the mean loss over `parts`, (input ids, labels) of about equal size.

    Each thread does one part on one core. They synchronise once a step. Threads inside an operation would synchronise
    in each operation, and wait for each other when other processes use the cores.
    """
    parameters = list(model.parameters())

    def work(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = model(input_ids=part[0], labels=part[1]).loss
        return loss.item(), torch.autograd.grad(loss, parameters)

    losses, gradients = zip(*pool.map(work, parts), strict=True)
    for parameter, *shares in zip(parameters, *gradients, strict=True):
        parameter.grad = torch.stack(shares).mean(0)
    for parameter, part in kept.items():
        assert parameter.grad is not None
        parameter.grad[part] = 0.0  # neither optimizer changes a weight without a gradient
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(sum(losses) / len(losses))


def _as_json(values: dict[str, object]) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(json.dumps(values))
    return loaded


def write_weights(config: TrainConfig, model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a checkpoint folder in the Hub's form; weights in bfloat16, the tied output matrix stored once."""
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
            "rope_theta": config.rope_theta,
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
