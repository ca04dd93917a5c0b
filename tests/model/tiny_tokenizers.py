"""Small tokenizers of the kinds real checkpoints have: byte-level BPE, and BPE over "▁" pieces with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 700  # of those that most tests read

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's a story, isn't it?",
    "Once upon a time there was a little girl who had 3 cats and 12 dogs; they lived by the sea.",
    "def main():\n    for i in range(10):\n        print(i, end=' ')\n\n\treturn None\n",
    "Grüße aus Köln! Ça va? 日本語のテキスト。 Привет, мир. 你好 🙂🙃 👩‍👩‍👧‍👦",
    "user assistant system model What is your name? My name is Mill. Hello there, how are you today?",
]

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'].strip() + eos_token }}
    {%- endif %}
{%- endfor %}"""

STYLES = ("chatml", "llama3", "mistral")


def make_tokenizer(style: str, path: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Write a tokenizer of `vocab_size` ids into `path`; ids 0, 1, 2 are pad, begin and end."""
    tokenizer, names, template = {"chatml": _chatml, "llama3": _llama3, "mistral": _mistral}[style](vocab_size)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=names[0],
        bos_token=names[1],
        eos_token=names[2],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(path)
    return fast


def _chatml(vocab_size: int) -> tuple[Tokenizer, list[str], str]:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _byte_level(vocab_size, names, None), names, CHATML


def _llama3(vocab_size: int) -> tuple[Tokenizer, list[str], str]:
    names = ["<|pad|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = _byte_level(vocab_size, names, split)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names[1]} $A", special_tokens=[(names[1], tokenizer.token_to_id(names[1]))]
    )
    return tokenizer, names, LLAMA3


def _byte_level(vocab_size: int, names: list[str], split: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = (
        byte_level
        if split is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 20,
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return _padded(tokenizer, vocab_size)


def _mistral(vocab_size: int) -> tuple[Tokenizer, list[str], str]:
    """As Llama 2 and Mistral 7B: spaces are "▁", one is put before the text, bytes stand in for unknown characters."""
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    trained.train_from_iterator(
        [text for text in TEXT if text.isascii()] * 3,
        trainers.BpeTrainer(vocab_size=300, special_tokens=[], show_progress=False),
    )
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    all_pieces = [*names[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {piece: index for index, piece in enumerate(all_pieces)}
    merges = _merges(trained)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _padded(tokenizer, vocab_size), names, MISTRAL


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _padded(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """With ordinary added tokens up to the size of the model's embedding, so that every id means something."""
    missing = vocab_size - tokenizer.get_vocab_size()
    assert missing >= 0, missing
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(missing)])
    return tokenizer
