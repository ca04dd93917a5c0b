"""Texts in which the ways of splitting differ: numbers, scripts, runs of spaces, contractions, signs, marks."""

from __future__ import annotations

TEXTS = (
    "I'm sure we'LL go, they'Ve 'told it's",
    "'RE 'twas y'all O'Reilly d'accord",
    "1 22 333 4444 55555 666666 7777777",
    "3.14 3..3 1,000,000 x2y 0x1F \u00bd\u0663\u0664",
    "a  b   c    d \t\te",
    "line\n\nnext \n  indented\r\n\r\n\tend  ",
    "   three before, and after   ",
    "HelloWORLD camelCase \u01c5ungla iPhone X\u00c9",
    "\u4f60\u597d\u4e16\u754c\uff0c\u6211\u5728apple\u5de5\u4f5c",
    "\u6211\u60f3\u57281314151\u5929\uff5e\u3002\u300c\u5f15\u300d",
    "\u304b\u306a\u30ab\u30ca\u6f22\u5b57 \u30fc\uff76\uff85",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4. \u3131\u314f",
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438",
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u00c4\u00d6\u00fc\u00df \u10e5\u10d0\u10e0\u10d7",
    "\u0646\u0635 \u0639\u0631\u0628\u064a \u06d4\u060c\u061f \u0661\u0662\u0663",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23\u0e31\u0e1a \u1780\u17b6\u1793\u17cb",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e\u0964",
    "e\u0301te\u0301 n\u0303 a\u0308\u0323",
    "\U0001f680 (ok) \U0001f636\u200d\U0001f32b\ufe0f \u2705\U0001f999\U0001f999",
    "!!!??? ------=== '''```\"\"\" ....",
    "$x = {a: [1, 2]}; // c++ <b>&amp;</b>",
    "path/to/file_name.txt #tag @me 100%",
    "\u2018q\u2019 \u201cq\u201d \u2014 \u2026 \uff01\uff1f\uff1a",
    "a\u00a0b\u2003c\u3000d\u200be",
    "IMGIMGABCDZ <sentinel:12> x",
)
