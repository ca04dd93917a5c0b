"""How byte-level tokenizers split a text into the words that they merge within, by the name that GGUF files have.

A file holds neither the expressions nor whether a text is normalized first. Both are here as the models' own tokenizers
have them: in their tokenizer.json, or in their code for tiktoken. llama.cpp, from which the names are, finds the same
words, but normalizes no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
SIGNS, LINES, SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
REST = rf"{SIGNS}|{LINES}|{SPACES}"
GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
LLAMA3 = rf"{CONTRACTION}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
JAIS2 = (
    rf"{CONTRACTION}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{SIGNS}|{LINES}|"
    + "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
    + r"|\s{1}"
)
QWEN2 = rf"{CONTRACTION}|{BEFORE}\p{{L}}+|\p{{N}}|{REST}"
TURKISH = rf"{BEFORE}\p{{L}}+|\p{{N}}|{REST}"
MINICPM5 = rf"{CONTRACTION}|{BEFORE}\p{{L}}+|\p{{N}}+|{REST}"
QWEN35 = (  # marks belong to letters
    rf"{CONTRACTION}|{BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}|{SPACES}"
)
SEED = rf"{CONTRACTION}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}|{SPACES}"
BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{BEFORE}\p{{L}}+|\p{{N}}|{SIGNS}|\s*[\r\n]|{SPACES}"
EXAONE_MOE = (  # several words, each with its marks
    rf"{CONTRACTION}|{BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    rf"|\s*[\r\n]|{SPACES}"
)
SIGNS_AND_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}|{SIGNS_AND_PATHS}|{LINES}|{SPACES}"
CASED = rf"{BEFORE}{UPPER}*{LOWER}+{CONTRACTION}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTION}?"
GPT4O = rf"{CASED}|\p{{N}}{{1,3}}|{SIGNS_AND_PATHS}|{LINES}|{SPACES}"
NOT_HAN = CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
KIMI = rf"\p{{Han}}+|{NOT_HAN}|\p{{N}}{{1,3}}|{REST}"
KANJI = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"  # and kana
MARKED = (  # words with their marks, or letters behind a sign
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
DEEPSEEK3_WORDS = rf"{MARKED}[\r\n]*|{LINES}|{SPACES}"
DEEPSEEK3 = (r"\p{N}{1,3}", KANJI, DEEPSEEK3_WORDS)
SPARK = (r"\p{N}{1,3}", KANJI, rf"{MARKED}|[\r\n]|{SPACES}", r"\p{N}")
AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # by three, from the last one on
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    DEEPSEEK3_WORDS,
)
YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{KANJI}",
    GPT4O.replace("{1,3}", ""),
)
EAST_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CASED_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    r"\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    r"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    r"\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    r"\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    r"\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    r"\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    r"\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{CASED_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    EAST_ASIAN,
    r"\p{N}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}")
SENTENCE = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split. Expressions are of Oniguruma, as the tokenizers library has them."""

    splits: tuple[str, ...]  # each applied to what the ones before it left
    is_nfc: bool = False  # a text is normalized first
    takes_words: bool = False  # a word that is a token is not merged of parts
    begins: bool = False  # a text has the begin token in front, if the file is silent


_PLAIN, _DIGITS = PreTokenizer((GPT2,)), PreTokenizer((r"\p{N}", GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,))
_QWEN2 = PreTokenizer((QWEN2,))
_GPT4O = PreTokenizer((GPT4O,), takes_words=True)
_DEEPSEEK3 = PreTokenizer(DEEPSEEK3)


def _all(names: str, value: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), value)


# by the name in a file
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_all("gpt-2 phi-2 roberta-bpe exaone4 trillion granite-docling gigachat a.x-4.0 mellum modern-bert jais", _PLAIN),
    **_all("jina-v1-en jina-v2-code jina-es jina-de jina-v2-es jina-v2-de", _PLAIN),
    **_all("mpt olmo", replace(_PLAIN, is_nfc=True)),  # GPT-NeoX
    **_all("starcoder refact smollm codeshell exaone minerva-7b mellum2", _DIGITS),
    "command-r": replace(_DIGITS, is_nfc=True),
    **_all(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0 jina-v5-nano",
        replace(_LLAMA3, takes_words=True, begins=True),
    ),
    **_all("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3),
    "jais-2": PreTokenizer((JAIS2,)),
    **_all("deepseek-r1-qwen stablelm2 hunyuan megrez grok-2 kormo solar-open", _QWEN2),
    **_all("qwen2 f2llmv2", replace(_QWEN2, is_nfc=True)),
    "qwen35": PreTokenizer((QWEN35,), is_nfc=True),
    "ufakzeka": PreTokenizer((TURKISH,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", MINICPM5), takes_words=True),
    "seed-coder": PreTokenizer((SEED,)),
    **_all("bailingmoe bailingmoe2 llada-moe", PreTokenizer((BAILING,))),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
    "tekken": PreTokenizer((TEKKEN,), takes_words=True, begins=True),
    **_all("gpt-4o llama4 kanana2 talkie granite-embed-multi-97m minimax-m2", _GPT4O),
    **_all("tiny_aya cohere2moe", replace(_GPT4O, splits=(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O))),
    "youtu": PreTokenizer(YOUTU, takes_words=True),
    **_all("kimi-k2 kimi-k25", PreTokenizer((KIMI,), takes_words=True)),
    "deepseek-llm": PreTokenizer(DEEPSEEK),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    **_all("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    "spark2_5": PreTokenizer(SPARK),
    "afmoe": PreTokenizer(AFMOE),
    **_all("bloom gpt3-finnish poro-chat", PreTokenizer((SENTENCE,))),
    "viking": PreTokenizer((SENTENCE, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenizer(CHAMELEON, begins=True),
}
# what the first files of these architectures meant, which had no name for it
OF_ARCHITECTURE: Mapping[str, str] = {
    **{name: name for name in ("bloom", "command-r", "falcon", "mpt", "olmo", "qwen2", "starcoder")},
    **{"gpt2": "gpt-2", "phi2": "phi-2", "gptneox": "olmo", "qwen2moe": "qwen2", "starcoder2": "starcoder"},
}
