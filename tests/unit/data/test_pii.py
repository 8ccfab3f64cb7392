"""Personal data: what is found, what must not be, and that nothing found is shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dschat_core.config import PiiGate
from dschat_core.data.gates.block import Block
from dschat_core.data.gates.pii import find, mask_text, masked, pii

FOUND = [
    ("write to anna.smith+work@mail.example.co.uk please", "email"),
    ("邮箱是abc_123@qq.com，谢谢", "email"),
    ("call me at +49 170 1234567", "phone"),
    ("+1 (415) 555-2671", "phone"),
    ("my number is 415-555-2671.", "phone"),
    ("(415) 555-2671 is the office", "phone"),
    ("我的手机13812345678", "phone"),
    ("138 1234 5678", "phone"),
    ("电话：010-62345678", "phone"),
    ("phone: 4155552671", "phone"),
    ("card 4111 1111 1111 1111 exp 12/27", "card"),
    ("5500-0000-0000-0004", "card"),
    ("amex 3782 822463 10005", "card"),
    ("身份证11010519491231002X", "id_number"),
    ("SSN 536-22-1234", "id_number"),
    ("DE89 3704 0044 0532 0130 00", "iban"),
    ("GB82WEST12345698765432", "iban"),
    ("BE68 5390 0754 7034 FROM ME", "iban"),
    ("+33 6 12 34 56 78", "phone"),
    ("+44 (0)20 7946 0958", "phone"),
    ("请拨打+86 138 1234 5678", "phone"),
    ("8613812345678", "phone"),
    ("请打13812345678找我", "phone"),
    ("1-808-555-1234", "phone"),
    ("my mobile is 07700 900123", "phone"),
    ("tel: 020-7946-0958", "phone"),
    ("(010) 62345678", "phone"),
    ("电话：021 6234 5678", "phone"),
    ("4155552671 is my phone number", "phone"),
    ("he said 415-555-2671", "phone"),
    ("to order: 415-555-2671", "phone"),
    ("phone=13812345678", "phone"),
    ("１３８１２３４５６７８", "phone"),
    ("银行卡号 6222 0212 3456 7890 128", "card"),
    ("身份证号110105 19491231 002X", "id_number"),
    ("social security number 536221234", "id_number"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "key"),
    ("authorization: bearer abcdef0123456789abcdef0123456789", "key"),
    ("glpat-abcdefghij1234567890", "key"),
    ("sk_live_4eC39HqLyjWDarjtT1zdp7dc", "key"),
    ("AKIAIOSFODNN7EXAMPLE", "key"),
    ("token ghp_16C7e42F292c6912E7710c838347Ae178B4a", "key"),
    ("sk-proj-abcdefghij1234567890ABCDE", "key"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "key"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N", "key"),
]
CLEAN = [
    "see you at 10:30 on 2024-05-06",
    "version 1.2.3.4567 of the kernel 5.15.0-107",
    "the order number is 13912345678",
    "订单号 13912345678 已发货",
    "1234567890 * 4 = 4938271560",
    "timestamp 1700000000 or 1700000000123",
    "4111 1111 1111 1112 is not a valid card",
    "ISBN 978-3-16-148410-0",
    "pi is 3.14159265358979323846",
    "110105194912310021 is no identity number",
    "SSN 000-12-3456 and 666-12-3456 are never given",
    "DE89 3704 0044 0532 0130 01 has a wrong checksum",
    "user@localhost and @someone mentioned you",
    "sk-learn is a library, ask-me-anything-about-your-favourite-things",
    "10000000000 atoms, 2000 years, 365 days",
    "192.168.100.200 and 10.0.0.1",
    "北京 100081，房间 1301，价格 1399 元",
    "rows 2147483647 to 4294967295",
    "8 + 1 415 is 1 423",
    "a 1-800 pound gorilla",
    "order 4111111111111111 has shipped",
    "订单编号：6222021234567890128",
    "文件大小13812345678字节，销售额达到13912345678元",
    "13812345678 * 2, 13812345678 bytes, ¥13812345678",
    "学号 13812345678",
    "https://example.com/item/13812345678.html",
    "user_13812345678 and id=13812345678",
    "+100 200 300 400 points, x = +12 34 56 78, SUM(+12345678)",
    "range 200-300-4000, room 415 555 2671",
    "part number 536-22-1234",
    "the phone costs 1234567890 rupiah, mobile data: 12345678901 bytes",
    "call me on 2024-05-06 10:30",
    "git clone git@github.com:user/repo.git; scp me@host.org:data/x .; logo@2x.png; lodash@4.17.21",
    "uuid 550e8400-e29b-41d4-a716-446655440000",
    "sk-learn-contrib-project-name-2024-version",
    "A file that starts with -----BEGIN PRIVATE KEY----- holds a key. Call 5 people.",
    "-----BEGIN CERTIFICATE-----\nMIIEow1\n-----END CERTIFICATE-----",
]


@pytest.mark.parametrize(("text", "kind"), FOUND)
def test_personal_data_is_found(text: str, kind: str) -> None:
    assert [found for _, _, found in find(text)] == [kind]
    assert f"<{kind.upper()}>" in mask_text(text)


@pytest.mark.parametrize("text", CLEAN)
def test_ordinary_numbers_are_not(text: str) -> None:
    assert find(text) == []
    assert mask_text(text) == text


@given(st.lists(st.sampled_from([text for text, _ in FOUND] + CLEAN), min_size=1, max_size=4).map(" ; ".join))
def test_masked_text_has_nothing_left_to_mask(text: str) -> None:
    once = mask_text(text)
    assert find(once) == []
    assert mask_text(once) == once


@given(
    st.lists(
        st.sampled_from([text for text, _ in FOUND] + CLEAN + ["phone: ", "order ", "号码"]), min_size=1, max_size=4
    )
)
def test_what_is_flagged_is_what_masking_changes(turns: list[str]) -> None:
    row = {"messages": [{"role": "user", "content": turn} for turn in turns]}
    hidden = masked("prompts", row)
    assert [finding.row for finding in pii(Block("prompts", [row, hidden]), PiiGate()).findings] == [0] * (
        hidden != row
    )


@given(st.text(st.sampled_from("0123456789 -+().@aA-Z_身份证:"), max_size=80))
def test_any_text_is_masked_once_and_for_all(text: str) -> None:
    assert find(mask_text(text)) == []


def test_rows_are_flagged_counted_and_masked_in_every_turn() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "mail a@example.org"},
            {"role": "assistant", "content": "b@example.org"},
        ],
        "chosen": "or c@example.org",
        "rejected": "+49 170 1234567",
        "kind": None,
    }
    found = pii(Block("preferences", [{**row, "messages": [], "chosen": "x", "rejected": "y"}, row]), PiiGate())
    assert [(finding.row, finding.reason) for finding in found.findings] == [(1, "email")]
    assert found.stats == {"email": 3, "phone": 1}
    assert "example.org" not in json.dumps(found.findings[0].detail)
    hidden = json.dumps(masked("preferences", row))
    assert "example.org" not in hidden
    assert "1234567" not in hidden
    assert hidden.count("<EMAIL>") == 3
    assert masked("text", {"text": "a@example.org"}) == {"text": "<EMAIL>"}


def test_a_key_ends_where_it_ends() -> None:
    key = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIrYSSNQFaA2Hwf1duRSxKtLYX5CB04fSeQ6tF1aY\n"
    assert mask_text(f"{key}and that was it") == "<KEY>\nand that was it"
    assert mask_text(f"a {key}-----END EC PRIVATE KEY----- b") == "a <KEY> b"


def test_hostile_text_takes_no_time() -> None:
    for text in (
        "a@b.org " * 20_000,
        "-----BEGIN PRIVATE KEY-----" * 5_000,
        "(0 " * 20_000,
        "1 (" * 20_000,
        "DE12 " * 20_000,
        "a" * 50_000 + "@",
        "1" * 50_000,
        "1-" * 25_000,
        "a." * 25_000 + "@b",
        "A1" * 25_000,
        "+1 " * 20_000,
    ):
        find(text)
