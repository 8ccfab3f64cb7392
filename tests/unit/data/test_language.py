"""Languages told from scripts and common words."""

from __future__ import annotations

import pytest

from dschat_core.config import LanguageGate
from dschat_core.data.gates.block import Block
from dschat_core.data.gates.language import language, language_of


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Hello, how are you doing today?", "en"),
        ("i dont think thats what he said lol", "en"),
        ("What’s the difference between them?", "en"),
        ("你好，今天天气怎么样？", "zh"),
        ("這個API怎麼用", "zh"),
        ("请用 Python 写一个函数 def hello(): pass 谢谢", "zh"),
        ("今日はとても暑いですね", "ja"),
        ("안녕하세요 반갑습니다", "ko"),
        ("Привет, как дела?", "ru"),
        ("مرحبا كيف حالك", "ar"),
        ("Ich weiß nicht, ob das eine gute Idee ist", "de"),
        ("Je ne sais pas si c'est une bonne idée", "fr"),
        ("No sé si esta es una buena idea, pero me gusta", "es"),
        ("Eu não sei se isso é uma boa ideia", "pt"),
        ("Non so se questa è una buona idea", "it"),
        ("Cos'è questa storia dell'arte?", "it"),
        ("Dünyanın en güzel şehri hangisi?", "tr"),
        ("Đây là một cuốn sách hay", "vi"),
        ("Добрий день, як ся маєте?", "uk"),
        ("حال شما چطور است؟ می‌خواهم چیزی بپرسم", "fa"),
        ("آپ کیسے ہیں؟", "ur"),
        ("आप कैसे हैं?", "hi"),
        ("तुम्ही कसे आहात?", "mr"),
        ("நீங்கள் எப்படி இருக்கிறீர்கள்?", "ta"),
        ("Ég veit ekki hvað þetta þýðir eiginlega", "other"),
        ("Hi! I met Dvořák and Nuñez; they were nice.", "en"),
        ("I said: STRASSE IS GERMAN, AND SO IS “Schluss”", "en"),
        ("这个品牌叫“无印の良品”吗？我想去看看", "zh"),
        ("lol", "und"),
        ("12345 !!!", "und"),
        ("x = np.zeros(10)", "und"),
        ("no", "und"),
        ("", "und"),
        ("😀😀", "und"),
    ],
)
def test_languages(text: str, code: str) -> None:
    assert language_of(text) == code


def test_rows_of_other_languages_are_flagged_only_where_some_are_allowed() -> None:
    block = Block("text", [{"text": text} for text in ("How are you doing?", "你好吗", "¿Cómo estás, qué tal?", "lol")])
    assert language(block, LanguageGate()).findings == []
    found = language(block, LanguageGate(allowed=("en", "zh")))
    assert [(finding.row, finding.reason, finding.detail) for finding in found.findings] == [
        (2, "language_not_allowed", {"language": "es"})
    ]
    assert found.stats == {"en": 1, "zh": 1, "es": 1, "und": 1}
