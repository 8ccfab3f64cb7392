"""The duplicates gate: what is one text, what is near, and that nothing but the rows decides."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat_core.data.gates import duplicates as module
from dschat_core.data.gates.duplicates import NUM_BANDS, comparable, find_first, signatures

LONG = "the quick brown fox jumps over the lazy dog and then it sleeps in the warm sun all day"
CHINESE = "今天天气很好我们一起去公园散步吧然后去吃好吃的火锅晚上看电影"
WORDS = [f"{a}{b}{c}" for a in ("ba", "ko", "tri", "se") for b in ("lum", "na", "pe", "ch") for c in "aeiourst"]
CHARACTERS = [chr(0x4E00 + 7 * i) for i in range(300)]


def resolve(forms: list[str], near: float = 0.8, memory_bytes: int | None = None) -> list[int]:
    made = signatures(forms)
    found = find_first(made.keys, made.bands, made.widths, forms, near_jaccard=near, memory_bytes=memory_bytes)
    return found.tolist()


def duplicates(*texts: str, near: float = 0.8) -> list[int]:
    return resolve([comparable(text) for text in texts], near)


def shingles(form: str, width: int) -> set[str]:
    return {form[i : i + width] for i in range(len(form) - width + 1)}


def true_jaccard(first: str, second: str, width: int = 5) -> float:
    a, b = shingles(first, width), shingles(second, width)
    return len(a & b) / len(a | b)


def brute_force(forms: list[str], width: int, threshold: float) -> list[int]:
    """The clusters by comparing all pairs."""
    first = list(range(len(forms)))
    for b in range(len(forms)):
        for a in range(b):
            if first[a] != first[b] and true_jaccard(forms[a], forms[b], width) >= threshold:
                low, high = sorted((first[a], first[b]))
                first = [low if root == high else root for root in first]
    return first


def planted(seed: int, rows: int, *, chinese: bool = False) -> list[str]:
    """Forms of 30 words or 40 characters, half of them edited copies of others."""
    dice = random.Random(seed)
    units, length = (CHARACTERS, 40) if chinese else (WORDS, 30)
    texts = [dice.choices(units, k=length) for _ in range(rows // 2)]
    while len(texts) < rows:
        copy = list(dice.choice(texts))
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(copy))
            edit = dice.randrange(3)
            copy[at : at + (edit != 0)] = [] if edit == 1 else [dice.choice(units)]
        texts.append(copy)
    dice.shuffle(texts)
    return ["".join(text) for text in texts]


def test_d14_width_case_and_punctuation_do_not_make_a_difference() -> None:
    assert duplicates("Ｈｅｌｌｏ， Ｗｏｒｌｄ！", "hello world", "HELLO  WORLD?!", "hello worlds") == [0, 0, 0, 3]
    assert duplicates("你好，世界！", "你好世界", "你好 世界。", "『你好』……世界～", "ﾃｽﾄ", "テスト") == [
        0,
        0,
        0,
        0,
        4,
        4,
    ]
    assert comparable("STRASSE") == comparable("straße!")
    assert comparable("①２㎏ ℃") == "12kgc"


@pytest.mark.parametrize(
    "invisible", ["\u200b", "\u00ad", "\u200d", "\ufeff", "\ufe0f", "\u2060", "\u3164", "\u00a0", "\u3000"]
)
def test_invisible_characters_are_nothing(invisible: str) -> None:
    assert comparable(f"he{invisible}llo 世{invisible}界") == "hello世界"
    assert comparable(f"hel{invisible}lo") == "hello"
    assert comparable(f":{invisible})") == ":)"
    assert comparable(invisible) == ""


def test_marks_that_make_a_letter_are_kept() -> None:
    assert comparable("cafe\u0301") == comparable("CAF\u00c9") != comparable("cafe")
    assert comparable("कि") != comparable("की")


def test_texts_of_punctuation_alone_are_told_apart() -> None:
    assert duplicates(":)", ":(", ": )", "???", "？？？", "😀", "😡") == [0, 1, 0, 3, 3, 5, 6]


@given(st.text(st.characters(codec="utf-8")))
def test_comparing_ignores_case_and_ascii_punctuation_of_any_text(text: str) -> None:
    form = comparable(text)
    if any(character.isalnum() for character in form):
        assert comparable(f" {text}!") == form
    if text.isascii():
        assert form == (
            "".join(character for character in text.lower() if character.isalnum()) or "".join(text.split())
        )


def test_near_duplicates_cluster_on_the_first_and_unrelated_texts_do_not() -> None:
    assert duplicates("something else entirely, said by someone", LONG, LONG + "s", "a " + LONG, LONG[::-1]) == [
        0, 1, 1, 1, 4,
    ]  # fmt: skip
    assert duplicates(CHINESE, CHINESE + "了", "我不喜欢下雨天因为出门不方便而且鞋子会湿所以待在家里") == [0, 0, 2]


def test_near_one_finds_exact_duplicates_only() -> None:
    assert duplicates(LONG, LONG + "s", LONG.upper(), near=1.0) == [0, 1, 0]
    without = signatures([LONG, LONG], near=False)
    assert without.bands.shape == (2, 0)
    assert find_first(without.keys, without.bands, without.widths, [LONG] * 2, near_jaccard=0.8).tolist() == [0, 0]


def test_short_texts_are_compared_exactly_only() -> None:
    assert duplicates("see you later", "see you laters", "See you, later!") == [0, 1, 0]
    assert signatures(["a" * 19, "a" * 20, "好" * 20]).widths.tolist() == [0, 5, 3]


def test_the_threshold_is_inclusive() -> None:
    first, second = "abcdefghijklmnopqrstuvwx", "abcdefghijklmnopqrstuvwxyz012"
    assert true_jaccard(first, second) == 0.8
    assert duplicates(first, second, near=0.8) == [0, 0]
    assert duplicates(first, second, near=0.81) == [0, 1]


def test_no_texts_have_no_duplicates() -> None:
    assert duplicates() == []
    assert duplicates("hi") == [0]
    assert duplicates("", "") == [0, 0]


@pytest.mark.parametrize("chinese", [False, True])
@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9])
def test_clusters_agree_with_brute_force(chinese: bool, threshold: float) -> None:
    forms = planted(3, 120, chinese=chinese)
    expected = brute_force(forms, 3 if chinese else 5, threshold)
    assert len(set(expected)) < 120
    found = resolve(forms, threshold)
    right = sum(a == b for a, b in zip(found, expected, strict=True))
    assert right >= (118 if threshold < 0.8 else 120)


def test_pairs_at_the_threshold_are_found() -> None:
    """20 bands of 5 find 99.96 % of the pairs at a similarity of 0.8."""
    dice = random.Random(1)
    forms = []
    for _ in range(1000):
        letters = [chr(0x400 + dice.randrange(0x800)) for _ in range(124)]
        copy = list(letters)
        for at in (30, 90):
            copy[at : at + 3] = [chr(0x1200 + dice.randrange(64)) for _ in range(3)]
        forms += ["".join(letters), "".join(copy)]
    similarities = [true_jaccard(a, b) for a, b in zip(forms[::2], forms[1::2], strict=True)]
    assert max(similarities) <= 0.8
    assert min(similarities) > 0.78
    found = resolve(forms, 0.78)
    assert sum(found[i] == found[i + 1] for i in range(0, 2000, 2)) >= 990


def test_signatures_do_not_depend_on_the_block_a_text_falls_in(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [*planted(0, 300), "short", *planted(0, 300, chinese=True), LONG * 50]
    together = signatures(forms)
    for start in (0, 299, 300, 601):
        alone = signatures(forms[start : start + 1])
        assert np.array_equal(alone.bands, together.bands[start : start + 1])
        assert np.array_equal(alone.keys, together.keys[start : start + 1])
        assert alone.widths[0] == together.widths[start]
    monkeypatch.setattr(module, "BLOCK_CHARACTERS", 500)
    assert np.array_equal(signatures(forms).bands, together.bands)
    assert together.bands.shape == (602, NUM_BANDS)
    assert together.bands.any(axis=1).tolist() == (together.widths > 0).tolist()
    copied = pickle.loads(pickle.dumps(together))
    assert np.array_equal(copied.bands, together.bands)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([500, 5_000, 20_000]))
def test_what_lies_on_disk_is_resolved_as_in_memory(seed: int, chinese: bool, memory_bytes: int) -> None:
    forms = planted(seed, 400, chinese=chinese)
    assert resolve(forms, memory_bytes=memory_bytes) == resolve(forms)


def test_partitions_batches_and_memory_maps_do_not_change_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(5)
    forms = planted(1, 1500) + planted(2, 500, chinese=True) + template_rows(dice, 500)
    made = signatures(forms)
    expected = resolve(forms)
    made.bands.tofile(tmp_path / "bands")
    bands = np.memmap(tmp_path / "bands", dtype=np.uint64, mode="r", shape=made.bands.shape)
    monkeypatch.setattr(module, "SPILLED_ROWS", 100)
    monkeypatch.setattr(module, "PAIRS_PER_BATCH", 7)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1000)
    for memory_bytes in (None, 1, 30_000):
        found = find_first(made.keys, bands, made.widths, forms, near_jaccard=0.8, memory_bytes=memory_bytes)
        assert found.tolist() == expected


def test_the_order_of_the_bands_does_not_matter() -> None:
    forms = planted(4, 1000) + template_rows(random.Random(2), 600)
    made = signatures(forms)
    shuffled = made.bands[:, np.random.default_rng(0).permutation(NUM_BANDS)]
    assert find_first(made.keys, shuffled, made.widths, forms, near_jaccard=0.8).tolist() == resolve(forms)


def test_temporary_files_are_removed_from_the_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = planted(0, 200)
    made = signatures(forms)
    spilled = module._spilled
    seen: list[int] = []

    def watched(columns: np.ndarray, chosen: np.ndarray, partitions: int, folder: Path) -> list[Path]:
        files = spilled(columns, chosen, partitions, folder)
        seen.append(sum(path.is_relative_to(tmp_path) and path.exists() for path in files))
        return files

    monkeypatch.setattr(module, "_spilled", watched)
    find_first(made.keys, made.bands, made.widths, forms, near_jaccard=0.8, memory_bytes=2000, folder=tmp_path)
    assert len(seen) == 2
    assert min(seen) > 1
    assert list(tmp_path.iterdir()) == []


def template_rows(dice: random.Random, rows: int) -> list[str]:
    """Forms that share most of their text, so that each falls into large buckets, and yet none is near another."""
    common = "asanaiassistanticannothelpwiththisrequestbutyoumaywanttoaskaprofessionalaboutyourquestionon"
    return [common + "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=40)) for _ in range(rows)]


def test_near_duplicates_are_found_among_thousands_of_boilerplate_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(9)
    forms = template_rows(dice, 3000)
    copies = {}
    for at in range(0, 3000, 30):
        copies[len(forms)] = at
        forms.append(forms[at][:-6] + "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=6)))
    assert all(true_jaccard(forms[a], forms[b]) >= 0.8 for a, b in copies.items())
    assert true_jaccard(forms[0], forms[1]) < 0.8
    compared = 0
    similar = module._similar

    def counted(pairs: np.ndarray, *rest: object) -> np.ndarray:
        nonlocal compared
        compared += len(pairs)
        return similar(pairs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_similar", counted)
    assert resolve(forms) == [*range(3000), *copies.values()]
    assert compared < 3000 * 3000 / 8


def test_a_large_cluster_is_joined_with_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [f"{LONG.replace(' ', '')}{number:06d}" for number in range(0, 10**6, 300)]
    compared = 0
    similar = module._similar

    def counted(pairs: np.ndarray, *rest: object) -> np.ndarray:
        nonlocal compared
        compared += len(pairs)
        return similar(pairs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_similar", counted)
    assert set(resolve(forms)) == {0}
    assert compared < 5 * len(forms)


def test_a_chain_longer_than_the_recursion_limit_is_one_cluster() -> None:
    letters = [chr(0x4E00 + i) for i in range(2 * sys.getrecursionlimit() + 60)]
    forms = ["".join(letters[i : i + 60]) for i in range(2 * sys.getrecursionlimit())]
    assert set(resolve(forms)) == {0}
