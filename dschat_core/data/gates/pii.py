"""Personal data and secrets: e-mail addresses, phone, identity and card numbers, bank accounts, keys.

Precision first: what has a checksum must satisfy it, and a plain run of digits is a phone number only where its form or
the words before it say so. What a finding matched is never shown.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args

from dschat_core.config import Dataset, PiiGate
from dschat_core.data.gates.block import Block, Finding, GateShard
from dschat_core.data.schemas import Row

Kind = Literal["key", "email", "iban", "card", "id_number", "phone"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# What each kind needs; that most texts have none of it is found out in a microsecond.
_KEY_SIGNS = (
    "PRIVATE KEY", "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "k_live_",
    "k_test_", "xox", "AIza", "hf_", "eyJ", "earer ", "EARER ", "secret_access_key", "SECRET_ACCESS_KEY",
)  # fmt: skip
_ANY_SIGN = re.compile("[0-9@０-９＠]")
_IBAN_SIGN = re.compile("[A-Z][A-Z][0-9][0-9]")
_NUMBER_SIGN = re.compile(r"[0-9](?:[ .()-]{0,2}[0-9]){8}")
_FULL_WIDTH = re.compile("[０-９＠＋－]")
_NARROW = str.maketrans("０１２３４５６７８９＠＋－", "0123456789@+-")

_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:(?!-----).)*-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|(?:(?:\s|\\n)*[A-Za-z0-9+/=]{20,})+)"
    r"|(?<![A-Za-z0-9])(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Z])"  # Amazon Web Services
    r"|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}|glpat-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{18,}"
    r"|sk-(?:proj|ant|svcacct|or)-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic and others
    r"|sk-(?=[A-Za-z]*\d)[A-Za-z0-9]{20,}(?![A-Za-z0-9-])"
    r"|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|xox[abprs]-(?=[A-Za-z-]*\d)[A-Za-z0-9-]{10,}"  # Slack
    r"|AIza[0-9A-Za-z_-]{35}|hf_(?=[A-Za-z]*\d)[A-Za-z0-9]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"  # JSON web token
    r"|(?i:aws_secret_access_key)[\"']? ?[=:] ?[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
    r"|(?:Bearer|bearer|BEARER) (?=[A-Za-z._~+/-]*\d)[A-Za-z0-9._~+/-]{20,}=*)",
    re.DOTALL | re.ASCII,
)
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])(?!git@)[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,5}"
    # Not the `name@2x.png` of a picture, nor the `user@host:path` of a copy command.
    r"(?!(?:png|jpe?g|gif|webp|svg)(?![A-Za-z0-9]))[A-Za-z]{2,24}(?![A-Za-z0-9]|:[\w.~-]*/)",
    re.ASCII,
)
_IBAN_LENGTHS = {
    15: "NO", 16: "BE", 18: "DK FI NL", 19: "SI", 20: "AT EE LT LU", 21: "CH HR LI LV", 22: "BG DE GB IE",
    23: "AE IL", 24: "AD CZ ES RO SA SE SK", 25: "PT", 26: "IS TR", 27: "FR GR IT MC", 28: "CY HU PL", 31: "MT",
}  # fmt: skip
_IBAN = re.compile(
    "(?<![A-Za-z0-9])(?=[A-Z]{2}[0-9])(?:"
    + "|".join(
        rf"(?:{countries.replace(' ', '|')})\d\d(?: ?[A-Z0-9]){{{size - 4}}}"
        for size, countries in _IBAN_LENGTHS.items()
    )
    + ")(?![A-Za-z0-9])",
    re.ASCII,
)
_CARD = re.compile(
    r"(?<![A-Za-z0-9_.,-])(?:\d{4}([ -]?)\d{4}\1\d{4}\1\d{1,4}(?:\1\d{1,3})?|3[47]\d\d([ -]?)\d{6}\2\d{5})"
    r"(?![A-Za-z0-9_-]|[.,]\d)",
    re.ASCII,
)
_CARD_FORM = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|35\d{14}|6(?:011|5\d\d)\d{12}|62\d{14,17}"
)
_ID_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.-])(?:1[1-5]|2[1-3]|3[1-7]|4[1-6]|5[0-4]|6[1-5]|71|8[1-3])\d{4} ?"  # province, district
    r"(?:18|19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01]) ?\d{3}[\dXx](?![A-Za-z0-9_-])"
    r"|(?<![A-Za-z0-9_.-])(?!000|666|9)\d{3}(?:-(?!00)\d\d-| ?(?!00)\d\d ?)(?!0000)\d{4}(?![A-Za-z0-9_-]|[.,]\d)",
    re.ASCII,
)
_NORTH_AMERICA = r"(?![234]00|555|\d11|\d9)[2-9]\d\d"
_PHONE = re.compile(
    r"(?<![\w+])\+1[ .-]?\(?[2-9]\d\d\)?[ .-]?[2-9]\d\d[ .-]?\d{4}(?![\d-])"
    r"|(?<![A-Za-z0-9_+])(?:\+|00)?86[ -]?1[3-9]\d([ -]?)\d{4}\1\d{4}(?![A-Za-z0-9_-])"
    r"|(?P<international>(?<![\w+])\+[2-9](?:[ .()-]{0,2}\d){9,13})(?![\d-])"
    rf"|(?<![\w.,-])(?:1[ .-])?(?:\({_NORTH_AMERICA}\) ?|{_NORTH_AMERICA}[.-])(?!\d11)[2-9]\d\d[ .-]\d{{4}}"
    r"(?![\w-]|[.,]\d)"
    r"|(?<![A-Za-z0-9_.,-])1[3-9]\d(?P<gap>[ -]?)\d{4}(?P=gap)\d{4}(?![A-Za-z0-9_-]|[.,]\d)"  # China, mobile
    r"|(?<![A-Za-z0-9_.,-])\(?0(?:10|2\d|[3-9]\d\d)(?:-|\) ?)[2-9]\d{6,7}(?![A-Za-z0-9_-])"  # China, land line
    # Anywhere, if it is called one.
    r"|(?P<any>(?<![A-Za-z0-9_.,+-])(?!(?:19|20)\d\d[ -]\d)\(?\d(?:[ .()-]{0,2}\d){8,12})(?![A-Za-z0-9_-]|[.,]\d)",
    re.ASCII,
)
_COUNTRY_CODE = re.compile(
    r"7|2[07]|3[0-469]|4[013-9]|5[1-8]|6[0-6]|8[1246]|9[0-58]|2[1-69]\d|3[578]\d|42\d|5[09]\d|6[789]\d|8[0578]\d|9[679]\d"
)
_CALLED_PHONE = re.compile(
    r"(?:\b(?:(?:tele)?phone|tel|mobile|cell|whatsapp|fax|call|(?:call|text|ring|phone|reach) (?:me|us|him|her|them))"
    r"(?: ?(?:number|no\b|num\b|nr\b|#))?(?:['’]s)?[\s:：.=\"'-]*(?:\b(?:is|at|on|to)\b)?"
    r"|(?:电话|電話|手机|手機|致电|致電|联系方式|聯繫方式|微信)(?:号码|號碼|号|號)?|号码|號碼)[\s:：=是为為\"'(-]*$",
    re.IGNORECASE,
)
_CALLED_PHONE_AFTER = re.compile(
    r" ?(?:is|was) (?:my|his|her|our|their|your|the) (?:\w+ )?(?:phone|cell|mobile|number|tel)|是我的?(?:电话|手机|号码)",
    re.IGNORECASE,
)
_CALLED_SSN = re.compile(r"(?:\bssn|social security(?: number)?|\bsocial)[\s:：#]*(?:\bis\b)?[\s:：]*$", re.IGNORECASE)
# Numbers of things, and amounts.
_CALLED_OTHERWISE = re.compile(
    r"(?:\b(?<!to )(?:order|invoice|ticket|tracking|serial|isbn|version|part|item|product|model|commit|reference|ref|"
    r"user id|id|timestamp|uid)"
    r"(?: ?(?:number|no\b|num\b|code|id|#))?(?:['’]s)?[\s:：.#\"'-]*(?:\bis\b)?[\s:：#\"']*"
    r"|(?:订单|訂單|单号|單號|编号|編號|流水|序列|学号|學號|工号|人口|金额|销售额|大小|总计|共计|达到|[Qq]{2})[^\d\n<>]{0,6}"
    r"|[=*/×÷+$€£¥￥#]\s*)$",
    re.IGNORECASE,
)
_COUNTED = re.compile(
    r"\s*(?:[*/=×÷^+%]|(?:元|块|圆|美元|人|个|次|字节|公里|米|年|吨)|"
    r"(?:bytes?|dollars?|people|times|items|pieces|points|rows|tokens|years|yuan|rupiah|won|yen)\b)",
    re.IGNORECASE,
)
_CONTEXT_CHARACTERS = 40
_CHINESE_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def pii(block: Block, section: PiiGate) -> GateShard:
    """Rows with personal data; the reason is the first kind found, `stats` counts all of them."""
    findings: list[Finding] = []
    stats: Counter[str] = Counter()
    for row, texts in enumerate(block.texts):
        # Turn by turn, as `masked` does: what a number is called in one says nothing of the next.
        if kinds := [kind for text in texts for _, _, kind in find(text)]:
            findings.append(Finding(row, kinds[0], {"kinds": sorted(set(kinds))}))
            stats.update(kinds)
    return GateShard(findings, stats)


def masked(kind: Dataset, row: Row) -> Row:
    """The row with `<EMAIL>`, `<PHONE>`, … in the place of personal data, in every turn."""
    if kind == "text":
        return {**row, "text": mask_text(row["text"])}
    changed = {**row, "messages": [{**turn, "content": mask_text(turn["content"])} for turn in row["messages"]]}
    for side in ("chosen", "rejected") if kind == "preferences" else ():
        changed[side] = mask_text(row[side])
    return changed


def mask_text(text: str) -> str:
    """The text with placeholders in the place of personal data."""
    # What stands beside a number decides whether it is one, and a placeholder may stand there now.
    while spans := find(text):
        pieces: list[str] = []
        at = 0
        for start, end, kind in spans:
            pieces += [text[at:start], f"<{kind.upper()}>"]
            at = end
        text = "".join([*pieces, text[at:]])
    return text


def find(text: str) -> list[tuple[int, int, Kind]]:
    """(start, end, kind) of all personal data in a text, in order, none overlapping."""
    taken: list[tuple[int, int, Kind]] = []
    if not _ANY_SIGN.search(text) and "PRIVATE KEY" not in text:
        return taken
    if not text.isascii() and _FULL_WIDTH.search(text):
        text = text.translate(_NARROW)
    has_number = _NUMBER_SIGN.search(text) is not None
    possible = {
        "key": any(sign in text for sign in _KEY_SIGNS),
        "email": "@" in text,
        "iban": _IBAN_SIGN.search(text) is not None,
        "card": has_number,
        "id_number": has_number,
        "phone": has_number,
    }
    for kind in (kind for kind in KINDS if possible[kind]):
        pattern, valid = _FORMS[kind]
        for match in pattern.finditer(text):
            start, end = match.span()
            at = bisect_left(taken, (start,))
            free = (at == 0 or taken[at - 1][1] <= start) and (at == len(taken) or end <= taken[at][0])
            if free and valid(text, match):
                taken.insert(at, (start, end, kind))
    return taken


def _digits(text: str) -> list[int]:
    return [int(character) for character in text if character.isdigit()]


def _before(text: str, match: re.Match[str]) -> str:
    return text[max(0, match.start() - _CONTEXT_CHARACTERS) : match.start()]


def _always(_text: str, _match: re.Match[str]) -> bool:
    return True


def _is_iban(_text: str, match: re.Match[str]) -> bool:
    """ISO 13616: modulus 97 of the rearranged number is 1."""
    account = match[0].replace(" ", "")
    return int("".join(str(int(character, 36)) for character in account[4:] + account[:4])) % 97 == 1


def _is_card(text: str, match: re.Match[str]) -> bool:
    """A known issuer's form and Luhn's checksum (ISO/IEC 7812-1), and not the number of something else."""
    digits = _digits(match[0])
    if not _CARD_FORM.fullmatch("".join(map(str, digits))):
        return False
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[-2::-2]]
    if (sum(digits[-1::-2]) + sum(doubled)) % 10 != 0 or len(set(digits)) == 1:
        return False
    return not _CALLED_OTHERWISE.search(_before(text, match))


def _is_id_number(text: str, match: re.Match[str]) -> bool:
    """A US social security number by its form, a Chinese identity number by its checksum (GB 11643-1999)."""
    before, number = _before(text, match), match[0].replace(" ", "")
    if len(number) < 18:
        is_called = _CALLED_SSN.search(before) is not None
        return is_called or ("-" in number and not _CALLED_OTHERWISE.search(before))
    rest = (12 - sum(a * b for a, b in zip(_digits(number[:17]), _CHINESE_ID_WEIGHTS, strict=True)) % 11) % 11
    return number[17].upper() == "0123456789X"[rest] and not _CALLED_OTHERWISE.search(before)


def _is_phone(text: str, match: re.Match[str]) -> bool:
    """A number of a form that only phone numbers have, or one that is called a phone number."""
    before, number = _before(text, match), match[0]
    after = text[match.end() : match.end() + _CONTEXT_CHARACTERS]
    if _CALLED_PHONE.search(before) or _CALLED_PHONE_AFTER.match(after):
        return True
    if match.lastgroup == "any" or _CALLED_OTHERWISE.search(before) or _COUNTED.match(after):
        return False
    if match.lastgroup == "international":
        return _COUNTRY_CODE.match("".join(map(str, _digits(number)))) is not None
    return True


_FORMS: dict[Kind, tuple[re.Pattern[str], Callable[[str, re.Match[str]], bool]]] = {
    "key": (_KEY, _always),
    "email": (_EMAIL, _always),
    "iban": (_IBAN, _is_iban),
    "card": (_CARD, _is_card),
    "id_number": (_ID_NUMBER, _is_id_number),
    "phone": (_PHONE, _is_phone),
}
