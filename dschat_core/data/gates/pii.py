"""Personal data and secrets: e-mail addresses, phone, identity and card numbers, bank accounts, keys.

Precision first: what has a checksum must satisfy it, and a plain run of digits is a phone number only where its form or
the words before it say so. What a finding matched is never shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args

from dschat_core.config import Dataset, PiiGate
from dschat_core.data.gates.block import Block, Finding, GateShard
from dschat_core.data.schemas import Row

Kind = Literal["key", "email", "iban", "card", "id_number", "phone"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Whatever is looked for below has one of these.
_MAYBE = re.compile(r"[\d@]|PRIVATE KEY")

_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:(?!-----END).)*(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
    r"|(?<![A-Za-z0-9])(?:"
    r"AKIA[0-9A-Z]{16}(?![0-9A-Z])"  # Amazon Web Services
    r"|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}"
    r"|sk-(?:proj-|ant-)?(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic and others
    r"|xox[abprs]-(?=[A-Za-z-]*\d)[A-Za-z0-9-]{10,}"  # Slack
    r"|AIza[0-9A-Za-z_-]{35}|hf_(?=[A-Za-z]*\d)[A-Za-z0-9]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"  # JSON web token
    r"|Bearer (?=[A-Za-z._~+/-]*\d)[A-Za-z0-9._~+/-]{20,}=*)",
    re.DOTALL,
)
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,5}[A-Za-z]{2,24}(?![A-Za-z0-9])"
)
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])")
_CARD = re.compile(
    r"(?<![\d.,-])\d{4}([ -]?)\d{4}\1\d{4}\1\d{1,7}(?![\d-]|[.,]\d)|(?<![\d.,-])3[47]\d\d([ -]?)\d{6}\2\d{5}(?![\d-]|[.,]\d)"
)
_CARD_FORM = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|35\d{14}|6(?:011|5\d\d)\d{12}|62\d{14,17}"
)
_ID_NUMBER = re.compile(
    r"(?<![A-Za-z0-9-])[1-9]\d{5}(?:18|19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx](?![A-Za-z0-9])"
    r"|(?<![\d-])(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\d-])"
)
_PHONE = re.compile(
    r"(?<![\w+])\+\d{1,3}(?:[ .-]?\(?\d{2,4}\)?){2,5}(?![\d-])"  # international
    r"|(?<![\w.-])\(?[2-9]\d\d\)?[ .-]\(?[2-9]\d\d[ .-]\d{4}(?![\d-]|[.,]\d)"  # North America
    r"|(?<![A-Za-z0-9.-])1[3-9]\d([ -]?)\d{4}\1\d{4}(?![A-Za-z0-9-]|[.,]\d)"  # China, mobile
    r"|(?<![\d-])0\d{2,3}-\d{7,8}(?![\d-])"  # China, land line
    r"|(?<![\w.-])\d{10,11}(?![\w-]|[.,]\d)"  # anywhere, if it is called one
)
_CALLED_PHONE = re.compile(
    r"(?:phone|tel|telephone|mobile|cell|whatsapp|call (?:me|us|him|her|them)|text (?:me|us|him|her|them)|reach me|"
    r"电话|電話|手机|手機|号码是|號碼是|致电|致電|联系方式|聯繫方式|微信)[^\d\n<>]{0,24}$",
    re.IGNORECASE,
)
_CALLED_OTHERWISE = re.compile(
    r"(?:order|invoice|ticket|tracking|serial|isbn|id|no\.?|version|#|订单|訂單|单号|單號|编号|編號|流水|序列|[=*/×÷])"
    r"[^\d\n<>]{0,12}$",
    re.IGNORECASE,
)
_CONTEXT_CHARACTERS = 40
_IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AT": 20, "BE": 16, "BG": 22, "CH": 21, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "EE": 20,
    "ES": 24, "FI": 18, "FR": 27, "GB": 22, "GR": 27, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IS": 26, "IT": 27,
    "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MT": 31, "NL": 18, "NO": 15, "PL": 28, "PT": 25, "RO": 24,
    "SA": 24, "SE": 24, "SI": 19, "SK": 24, "TR": 26,
}  # fmt: skip
_CHINESE_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def pii(block: Block, section: PiiGate) -> GateShard:
    """Rows with personal data; the reason is the first kind found, `stats` counts all of them."""
    findings: list[Finding] = []
    stats: Counter[str] = Counter()
    for row, text in enumerate(block.joined):
        if _MAYBE.search(text) and (spans := find(text)):
            findings.append(Finding(row, spans[0][2], {"kinds": sorted({kind for _, _, kind in spans})}))
            stats.update(kind for _, _, kind in spans)
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
    if not _MAYBE.search(text):
        return text
    pieces: list[str] = []
    at = 0
    for start, end, kind in find(text):
        pieces += [text[at:start], f"<{kind.upper()}>"]
        at = end
    return "".join([*pieces, text[at:]])


def find(text: str) -> list[tuple[int, int, Kind]]:
    """(start, end, kind) of all personal data in a text, in order, none overlapping."""
    taken: list[tuple[int, int, Kind]] = []
    for kind in KINDS:
        pattern, valid = _FORMS[kind]
        for match in pattern.finditer(text):
            start, end = match.span()
            if valid(text, match) and all(end <= other[0] or start >= other[1] for other in taken):
                taken.append((start, end, kind))
    return sorted(taken)


def _digits(text: str) -> list[int]:
    return [int(character) for character in text if character.isdigit()]


def _always(_text: str, _match: re.Match[str]) -> bool:
    return True


def _is_iban(_text: str, match: re.Match[str]) -> bool:
    """ISO 13616: modulus 97 of the rearranged number is 1."""
    account = match[0].replace(" ", "")
    if _IBAN_LENGTHS.get(account[:2]) != len(account):
        return False
    return int("".join(str(int(character, 36)) for character in account[4:] + account[:4])) % 97 == 1


def _is_card(_text: str, match: re.Match[str]) -> bool:
    """A known issuer's form and Luhn's checksum (ISO/IEC 7812-1)."""
    digits = _digits(match[0])
    if not _CARD_FORM.fullmatch("".join(map(str, digits))):
        return False
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1


def _is_id_number(_text: str, match: re.Match[str]) -> bool:
    """A US social security number by its form, a Chinese identity number by its checksum (GB 11643-1999)."""
    if "-" in match[0]:
        return True
    digits = _digits(match[0][:17])
    rest = (12 - sum(a * b for a, b in zip(digits, _CHINESE_ID_WEIGHTS, strict=True)) % 11) % 11
    return match[0][17].upper() == "0123456789X"[rest]


def _is_phone(text: str, match: re.Match[str]) -> bool:
    """Enough digits for a phone number, and nothing before it that calls it something else."""
    before = text[max(0, match.start() - _CONTEXT_CHARACTERS) : match.start()]
    number = match[0]
    if number.startswith("+"):
        return 8 <= len(_digits(number)) <= 15
    if _CALLED_OTHERWISE.search(before):
        return False
    has_form = not number.isdigit() or (len(number) == 11 and number[0] == "1" and number[1] in "3456789")
    return has_form or _CALLED_PHONE.search(before) is not None


_FORMS: dict[Kind, tuple[re.Pattern[str], Callable[[str, re.Match[str]], bool]]] = {
    "key": (_KEY, _always),
    "email": (_EMAIL, _always),
    "iban": (_IBAN, _is_iban),
    "card": (_CARD, _is_card),
    "id_number": (_ID_NUMBER, _is_id_number),
    "phone": (_PHONE, _is_phone),
}
