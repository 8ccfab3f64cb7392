"""Toxic turns; the embedded lexicon is precise, so that a hit means something, and far from complete.

It looks for abuse aimed at somebody, threats, calls to self-harm, sexual harassment, slurs and hate against groups, in
English and Chinese, in plain spelling and in the usual disguises (`f*ck`, `1d10t`, `f u c k`, `stuuupid`, full width).
Swearing at no one ("this fucking bus") is not toxic here, nor is telling of what others said. The patterns lie in
`lexicon_en.tsv` and `lexicon_zh.tsv`, written for this project.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from dschat_core.config import ToxicityGate
from dschat_core.data.gates.block import Block, Finding, GateShard
from dschat_core.data.gates.detectors import Detector, Hit
from dschat_core.data.schemas import row_texts
from dschat_core.data.unicode import nfkc


def toxicity(block: Block, section: ToxicityGate, detector: Detector) -> GateShard:
    """Rows with a toxic turn; of a pair the chosen reply is asked, the rejected one only with `check_rejected`."""
    if block.kind == "preferences" and not section.check_rejected:
        texts = [row_texts(block.kind, row, with_rejected=False) for row in block.rows]
    else:
        texts = block.texts
    hits = iter(detector([text for turns in texts for text in turns]))
    findings = []
    for row, turns in enumerate(texts):
        found = [(turn, hit) for turn, hit in enumerate(next(hits) for _ in turns) if hit is not None]
        if found:
            turn, hit = found[0]
            findings.append(Finding(row, hit.label, {"turn": turn + 1, "span": hit.span, "score": round(hit.score, 3)}))
    return GateShard(findings)


# ── the lexicon ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Lexicon:
    """Labelled patterns, the words (of Chinese: first characters) without which they cannot match, and lists of words."""

    patterns: tuple[tuple[str, re.Pattern[str]], ...]
    by_trigger: dict[str, tuple[int, ...]]
    lists: dict[str, frozenset[str]]
    ordered: dict[str, tuple[str, ...]]

    def hits(self, text: str, words: Sequence[str]) -> Iterator[tuple[str, re.Match[str]]]:
        """(label, match) of the patterns of which the text has a word."""
        triggers = self.by_trigger
        for index in sorted({index for word in words if word in triggers for index in triggers[word]}):
            label, pattern = self.patterns[index]
            for match in pattern.finditer(text):
                yield label, match


NEAR_CHARACTERS = 200
MAX_PIECE_CHARACTERS = 300
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s*")
_INVISIBLE = re.compile(r"[\u00ad\u034f\u200b-\u200f\u2060-\u2064\ufe0f\ufeff]")
_WORDS = re.compile(r"[a-z]+(?:'[a-z]+)*")
_HAN = re.compile(r"[\u3400-\u9fff]")
# Signs of a disguise; a text without any is searched as it is written.
_DISGUISED = re.compile(
    r"([a-z])\1\1|[a-z][*@$!#0-9]+[a-z*]|[*@$0-9][a-z]*[*@$][a-z]|\b[a-z](?:[ ._*-][a-z]\b){2}|\b[a-z]{1,3}\*"
)
_SPACED = re.compile(r"\b[a-z](?:[ ._*-][a-z]\b){2,}")
_STRETCHED = re.compile(r"([a-z])\1{2,}")
_MASKED = re.compile(r"(?<![a-z@$0-9])[a-z@$0-9]{0,20}[*#@$!_%0-9][a-z*#@$!_%0-9]{0,30}")
_LEET = str.maketrans("@4301!5$7", "aaeoiisst")
_BETWEEN_HAN = re.compile(r"(?<=[\u3400-\u9fff])[ .·*_|/\\~-]+(?=[\u3400-\u9fff])")
_SENTENCE = re.compile(r"[^.!?;]+")

# Somebody else's words, told; or words about a word.
_REPORTED = re.compile(
    r"(?:(?<!\bi )(?<!\bwe )\b(?:call(?:ed|s|ing)?|yell(?:ed|s|ing)?|scream(?:ed|s|ing)?|shout(?:ed|s|ing)?|text(?:ed|s)?|"
    r"wrote|writes|commented|posted|spray-?painted|muttered|chanted|replied|whispered)\b(?! you\b)"
    r"|\b(?:he|she|they|someone|somebody|people|dad|mom|father|mother|teacher|boss|ex|brother|sister|guy|kid|kids|who|anyone|"
    r"bull(?:y|ies)|users?|customer|comments?|character|villain|protagonist|driver|stranger|neighbou?r|voice|classmates?)"
    r" (?:\w+ ){0,2}(?:sa(?:id|ys?)|t(?:old|ells?)|think|thinks|was like|were like|goes|kept saying|keeps saying|mean|means|"
    r"claims?|believes?|argues?)\b"
    r"|\b(?:word|term|phrase|slur|slurs|lyrics?|lyric|song|titled?|quote|quotes|line|sign|message|tweet|book|movie|film|"
    r"episode|album|track|means?|meaning|definition|translates?|translation|example|examples|sentence|such as|insults?|"
    r"comments? like|things like|stuff like|names like|phrases like|say things|claim(?:s|ing)? that|myth(?: that)?|"
    r"stereotypes?(?: that)?|idea that|believe that|think that|argue that|propaganda|someone who|anyone who)\b"
    r")[^.!?]{0,45}$"
)
_DENIED = re.compile(
    r"(?:\b(?:do ?n[o']t|don't|dont|never|stop|not|isn't|ain't|aren't|wasn't|no one should|nobody should|wouldn't|would never|"
    r"didn't|doesn't|shouldn't|please don't|instead of|without|rather than|quit)\b(?: \w+){0,3}|\b(?:wrong|bad|offensive|rude|"
    r"racist|illegal|mean|hurtful|unacceptable|horrible) to(?: \w+){0,2}) ?[\"'“”]?$"
)
_ABOUT_WORDS = re.compile(
    r"\b(?:slurs?|derogatory|offensive (?:word|term|language)|hate speech|etymology|linguist\w*|n-word|f-word|pejorative|"
    r"racial epithet|moderation|moderators?|flagged|bullying|bullied|was (?:called|banned|arrested|charged|fired|suspended|"
    r"sentenced|convicted)|got (?:banned|suspended|fired|arrested)|(?:sent|received?|getting|got|gets) (?:\w+ ){0,2}(?:death )?"
    r"(?:threats?|messages?)|reported (?:him|her|them|it)|police|court|prosecutors?|defendant|verdict|convicted|sentenced)\b"
)
_PLAYFUL = re.compile(r"\b(?:lol|lmao|haha+|jk|just kidding|kidding|love you|<3|xd|hehe+)\b|[:;]-?[)dp]|😂|🤣|❤|😘")
_ZH_REPORTED = re.compile(
    r"(?:(?:他|她|他们|她们|有人|别人|人家|老板|同学|网友|前男友|前女友|前任|爸|妈|对方|客户|邻居|老师|那人|陌生人|男友|女友|"
    r"同事|领导|上司|司机|婆婆|孩子|室友|弹幕|评论|评论区|私信|对面|队友|反派|主角|角色|电影里|书里|剧里|小说里|歌里)[^。!！?？]{0,10}"
    r"(?:骂|罵|说|說|叫|喊|吼|怼|发|發|写|寫|回|留言|评论|威胁|威脅)|被(?:人|他|她|同学|网友|老板|骂|罵|叫|喊|说|威胁)[^。!！?？]{0,10}|"
    r"(?:词|詞|一词|这句|這句|这个字|短语|意思|翻译|翻譯|歌词|歌詞|台词|臺詞|片名|书名|书|電影|电影|引用|例如|比如|例句|所谓|類似|类似|"
    r"造谣|谣言|偏见|刻板印象|认为|認為|觉得|歧视))[^。!！?？]{0,16}$"
)
_ZH_DENIED = re.compile(
    r"(?:不要|别|別|不能|不应该|不應該|不是|没有|沒有|不会|不會|禁止|请勿|不许|不可以|从不|绝不|并不是|并非|怎么能|怎能|不该|停止|不准|"
    r"拒绝|反对|难道|又不是)[^。!！?？,，]{0,8}$"
)
_ZH_ABOUT_WORDS = re.compile(
    r"(?:这个词|這個詞|一词|这词|脏话|髒話|骂人话|粗口|网络用语|網絡用語|辱骂|辱罵|被判|判处|判處|判刑|起诉|起訴|报警|報警|警方|法院|"
    r"举报|舉報|霸凌|网暴|網暴|造谣|拘留|封号|违规|侮辱罪|歧视性|什么意思|什麼意思|怎么翻译|语料|台词|歌词)"
)
_QUOTES = {"“": "”", "「": "」", "『": "』", "‘": "’", '"': '"', "《": "》"}


def lexicon_hits(texts: Sequence[str]) -> list[Hit | None]:
    """The lexicon's `Detector`: the first hit of each text, as compared (NFKC, lower case)."""
    return [_first_hit(text) for text in texts]


def _first_hit(text: str) -> Hit | None:
    return next((hit for piece in _pieces(text) if (hit := _hit(piece)) is not None), None)


def _pieces(text: str) -> Iterator[str]:
    """Lines, and of long lines sentences: what is said in one has nothing to do with another, and costs less apart."""
    for line in text.split("\n"):
        if len(line) <= MAX_PIECE_CHARACTERS:
            yield line
        else:
            yield from _SENTENCE_END.split(line)


def _hit(text: str) -> Hit | None:
    english, chinese = _lexicon("lexicon_en.tsv"), _lexicon("lexicon_zh.tsv")
    is_ascii = text.isascii()
    folded = text.lower() if is_ascii else _INVISIBLE.sub("", nfkc(text)).casefold()
    folded = " ".join(folded.replace("’", "'").split())
    for view in _views(folded):
        words = _WORDS.findall(view)
        if not english.lists["aimed"].isdisjoint(words) and (hit := _aimed_hit(view, english.lists)):
            return hit
        if not english.by_trigger.keys().isdisjoint(words):
            for label, match in english.hits(view, words):
                if not _excused(view, match, label):
                    return Hit(match.group().strip(), label, 1.0)
    # Initials such as `cnm` are written without any Chinese character.
    view = folded if is_ascii else _BETWEEN_HAN.sub("", folded)
    signs = _WORDS.findall(view) if is_ascii else [*_WORDS.findall(view), *view]
    if not chinese.by_trigger.keys().isdisjoint(signs):
        for label, match in chinese.hits(view, signs):
            if not _excused_chinese(view, match):
                return Hit(match.group(), label, 1.0)
    return None


def _aimed_hit(text: str, lists: dict[str, frozenset[str]]) -> Hit | None:
    """A name that is nothing but abuse, with the person spoken to as the nearest person before it."""
    for sentence in _SENTENCE.finditer(text):
        words = [(match.group(), match) for match in _WORDS.finditer(text, sentence.start(), sentence.end())]
        for place, (word, match) in enumerate(words):
            if word not in lists["aimed"]:
                continue
            before = [said for said, _ in words[max(0, place - 7) : place]]
            persons = [i for i, said in enumerate(before) if said in lists["second"] or said in lists["others"]]
            person = persons[-1] if persons else None
            if person is None:
                # Called out with no person before it: "only an idiot would write what you wrote".
                after = [said for said, _ in words[place + 1 : place + 9]]
                aimed = not lists["second"].isdisjoint(after) and lists["apart"].isdisjoint(before)
            else:
                aimed = before[person] in lists["second"] and lists["apart"].isdisjoint(before[person + 1 :])
            if aimed and not _excused(text, match, "insult"):
                return Hit(match.group(), "insult", 1.0)
    return None


def _views(folded: str) -> Iterator[str]:
    """The text, and where it is disguised what it may stand for."""
    yield folded
    if _DISGUISED.search(folded):
        plain = _SPACED.sub(lambda match: re.sub(r"[ ._*-]", "", match.group()), folded)
        plain = _MASKED.sub(lambda match: _unmasked(match.group()), plain)
        once, twice = _STRETCHED.sub(r"\1", plain), _STRETCHED.sub(r"\1\1", plain)
        yield once
        if twice != once:
            yield twice


@lru_cache(maxsize=1)
def _maskable() -> tuple[str, ...]:
    """What may hide behind stars, most likely first."""
    return _lexicon("lexicon_en.tsv").ordered["masked"]


@lru_cache(maxsize=4096)
def _unmasked(word: str) -> str:
    """`f*ck` → fuck, `1d10t` → idiot; a word that is neither stays as it is."""
    plain = word.translate(_LEET)
    if plain.isalpha():
        return plain if any(character.isalpha() for character in word) else word
    pattern = re.compile(re.sub(r"[*#_%!]+", lambda run: f"[a-z]{{1,{len(run.group()) + 1}}}", plain))
    # A star at the end of a word often corrects a spelling ("be*").
    known = _maskable() if plain[-1:] == "*" else (*_maskable(), *_lexicon("lexicon_en.tsv").ordered["sure"])
    return next((candidate for candidate in known if pattern.fullmatch(candidate)), word)


def _excused(text: str, match: re.Match[str], label: str) -> bool:
    before, near = text[max(0, match.start() - 90) : match.start()], _around(text, match)
    if _REPORTED.search(before) or _DENIED.search(before) or _is_quoted(text, match):
        return True
    if label in ("slur", "hate", "insult") and _ABOUT_WORDS.search(near):
        return True
    return label in ("threat", "harassment") and _PLAYFUL.search(near) is not None


def _excused_chinese(text: str, match: re.Match[str]) -> bool:
    before = text[max(0, match.start() - 30) : match.start()]
    return bool(
        _ZH_REPORTED.search(before)
        or _ZH_DENIED.search(before)
        or _is_quoted(text, match)
        or _ZH_ABOUT_WORDS.search(_around(text, match))
    )


def _around(text: str, match: re.Match[str]) -> str:
    """What stands near a match; a long text says other things elsewhere."""
    return text[max(0, match.start() - NEAR_CHARACTERS) : match.end() + NEAR_CHARACTERS]


def _is_quoted(text: str, match: re.Match[str]) -> bool:
    """Whether the match lies between quotation marks near it, in a text that has words of its own around them."""
    first, last = max(0, match.start() - NEAR_CHARACTERS), match.end() + NEAR_CHARACTERS
    for opening, closing in _QUOTES.items():
        start = text.rfind(opening, first, match.start())
        if start < 0 or (opening == closing and text.count(opening, first, match.start()) % 2 == 0):
            continue
        end = text.find(closing, match.end(), last)
        if end >= 0 and closing not in text[start + 1 : match.start()]:
            return len(text) - (end - start) > 8
    return False


@lru_cache(maxsize=2)
def _lexicon(name: str) -> Lexicon:
    """Read a lexicon; its form is described at the top of `lexicon_en.tsv`."""
    is_chinese = name == "lexicon_zh.tsv"
    defined: dict[str, str] = {}
    patterns: list[tuple[str, re.Pattern[str]]] = []
    by_trigger: dict[str, list[int]] = {}
    for line in resources.files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line:
            continue
        for known, expansion in defined.items():
            # As words they are split at their bars later; elsewhere they are one group.
            line = line.replace(f"<<{{{known}}}", f"<<{expansion}").replace(f"{{{known}}}", f"(?:{expansion})")
        label, source, *listed = line.split("\t")
        if label.startswith("@"):
            defined[label[1:]] = source
            continue
        words = [word for group in (*listed, *re.findall(r"<<(.*?)>>", source)) for word in group.split("|")]
        assert words, line
        pattern = re.sub(r"<<(.*?)>>", r"(?:\1)", source)
        for word in words:
            # Of several words any will do; the last is mostly the rarest. Chinese has no words to split at.
            trigger = word[0] if _HAN.match(word) else re.split(r"[ -]", word)[-1]
            if len(patterns) not in by_trigger.setdefault(trigger, []):
                by_trigger[trigger].append(len(patterns))
        bounded = pattern if is_chinese else rf"(?<![a-z])(?:{pattern})(?![a-z])"
        patterns.append((label, re.compile(bounded)))
    return Lexicon(
        tuple(patterns),
        {trigger: tuple(indices) for trigger, indices in by_trigger.items()},
        {listed: frozenset(words.split("|")) for listed, words in defined.items()},
        {listed: tuple(words.split("|")) for listed, words in defined.items()},
    )
