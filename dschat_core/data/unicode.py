"""Unicode normalisation of text that nobody has checked."""

from __future__ import annotations

import re
import unicodedata

# Putting a run of combining marks in order takes time quadratic in its length. UAX 15's Stream-Safe Text Format allows
# 30 of them; no script needs more, and what has more is noise.
MAX_MARKS = 30
_MARK = (
    r"[\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u0670\u06d6-\u06ed\u0711-\u074a\u07eb-\u07f3"
    r"\u0816-\u082d\u0859-\u085b\u0898-\u08ff\u093c-\u0957\u0e31-\u0e4e\u0eb1-\u0ece\u0f18-\u0fc6\u135d-\u135f"
    r"\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u2cef-\u2cf1\u2de0-\u2dff\u302a-\u302f\u3099\u309a\ua66f-\ua69f"
    r"\ua8e0-\ua8f1\ufe20-\ufe2f\U0001d165-\U0001d244\U0001e000-\U0001e94a]"
)
_LONG_RUN = re.compile(f"({_MARK}{{{MAX_MARKS}}}){_MARK}+")


def nfkc(text: str) -> str:
    """The text in NFKC, of more than 30 combining marks in a row the first 30; time linear in its length."""
    return unicodedata.normalize("NFKC", _LONG_RUN.sub(r"\1", text))
