"""Dialogues → token ids, with the mask of what is trained and no way for a user's text to forge a control token.

Our own template is ChatML: `<|im_start|>role\ncontent<|im_end|>\n`. A base model's template is honoured instead where
it can be masked safely. Either way the Jinja source decides: it is rendered once per sequence of roles with markers in
place of the contents, which splits it into markup (may hold control tokens) and contents (never may). A row ends on the
last end-of-turn token; whatever the template writes after it belongs to the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dschat_core.errors import ConfigError
from dschat_core.template_analysis import depends_on_content

Message = dict[str, str]
Segment = tuple[str, bool]

DOCUMENT_END = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (DOCUMENT_END, PAD, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def render(messages: Sequence[Message], *, add_generation_prompt: bool) -> list[Segment]:
    """The dialogue in our own template as (text, may hold control tokens) pieces, contents apart from markup."""
    layout = _layout(CHAT_TEMPLATE, tuple(m["role"] for m in messages), add_generation_prompt, (), "the chat template")
    return _fill(layout, [m["content"] for m in messages])


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its template. `markup` knows control tokens, `plain` reads them as text."""

    markup: Tokenizer
    plain: Tokenizer
    template: str
    variables: tuple[tuple[str, str], ...]
    origin: str
    end_of_turn_id: int
    pad_id: int
    document_start_id: int
    document_end_id: int
    markup_ids: dict[str, list[int]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def vocab_size(self) -> int:
        """Entries, special tokens and ids that stand for nothing included: one more than the highest id."""
        return 1 + max(self.markup.get_vocab(with_added_tokens=True).values())

    @property
    def is_own_template(self) -> bool:
        """Whether the template is ours, whose contents pass verbatim by construction."""
        return self.template == CHAT_TEMPLATE

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text without control tokens, neither added nor recognised."""
        return self.plain.encode(text, add_special_tokens=False).ids

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of many texts, on all cores."""
        return [e.ids for e in self.plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_document(self, ids: list[int]) -> list[int]:
        """A document's ids between its start and end token, so that its first token is predicted too."""
        return [self.document_start_id, *ids, self.document_end_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens are left out."""
        return self.markup.decode(list(ids), skip_special_tokens=True)

    @cached_property
    def is_plain_template(self) -> bool:
        """Whether the template writes contents as they are, whatever they say; see `depends_on_content`."""
        return self.is_own_template or not depends_on_content(self.template)

    def shape(self, roles: tuple[str, ...], *, add_generation_prompt: bool) -> tuple[list[int], ...]:
        """Ids of the markup before each content of such a dialogue, and after the last: (roles + 1) lists.

        Without a generation prompt the last is cut behind the end-of-turn token, where a row ends.
        """
        slots: list[list[int]] = [[]]
        for text, is_markup in self._layout(roles, add_generation_prompt):
            if is_markup:
                slots[-1] = self.markup_tokens(text)
            else:
                slots.append([])
        if not add_generation_prompt and roles[-1] == "assistant":
            slots[-1] = slots[-1][:1]
        return tuple(slots)

    def check_verbatim(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> None:
        """Raises ConfigError if the template renders these messages to more or less than their contents and its markup."""
        layout = self._layout(tuple(m["role"] for m in messages), add_generation_prompt)
        self._check_verbatim(messages, layout, add_generation_prompt)

    def layout(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[Segment, ...]:
        """The template around these roles: markup pieces and, flagged False, the role whose content stands there."""
        layout = self._layout(tuple(m["role"] for m in messages), add_generation_prompt)
        if not self.is_own_template:
            self._check_verbatim(messages, layout, add_generation_prompt)
        return layout

    def _layout(self, roles: tuple[str, ...], generation: bool) -> tuple[Segment, ...]:
        layout = _layout(self.template, roles, generation, self.variables, self.origin)
        # The token after a reply is trained: it has to be there, and to be the one that generation stops at.
        for place, (role, is_markup) in enumerate(layout):
            if is_markup or role != "assistant":
                continue
            text, follows = layout[place + 1] if place + 1 < len(layout) else ("", True)
            if not follows or self.markup_tokens(text)[:1] != [self.end_of_turn_id]:
                raise ConfigError(
                    "the chat template does not end every reply with "
                    f"{self.markup.id_to_token(self.end_of_turn_id)!r}: after one it writes "
                    f"{text[:20] if follows else ''!r}",
                    where=self.origin,
                    why=f"roles {list(roles)}",
                    fix="use a base model whose template ends each reply alike, or only single-turn data",
                )
        return layout

    def _check_verbatim(self, messages: Sequence[Message], layout: tuple[Segment, ...], generation: bool) -> None:
        text = "".join(text for text, _ in _fill(layout, [m["content"] for m in messages]))
        if text != _render_text(self.template, messages, generation, self.variables, self.origin):
            raise ConfigError(
                "the chat template rewrites a message's content, so its tokens cannot be masked safely",
                where=self.origin,
                why=f"the content that it rewrites is one of {[m['content'][:40] for m in messages]}",
                fix="use a base model with a plain template, or put a ChatML template in its chat_template.jinja",
            )

    def markup_tokens(self, text: str) -> list[int]:
        """Ids of a piece of the template, control tokens recognised."""
        found = self.markup_ids.get(text)
        if found is None:
            found = self.markup_ids[text] = self.markup.encode(text, add_special_tokens=False).ids
        return found


def load_tokenizer(folder: str | Path) -> ChatTokenizer:
    """Read a Hugging Face tokenizer folder.

    Raises:
        ConfigError: no tokenizer.json, no usable chat template, or a template whose replies cannot be masked.
    """
    folder = Path(folder)
    try:
        source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no readable tokenizer.json in {folder}",
            why=str(error),
            fix="name a Hugging Face folder with a fast tokenizer",
        ) from None
    config = _read_json(folder / "tokenizer_config.json")
    # Every added token counts as a control token, also those a base model does not flag as special (`<think>`), but
    # not runs of spaces or newlines: they are what a text is made of, and nobody can forge a turn with them.
    never_in_text = {added["id"] for added in source.get("added_tokens", []) if added["special"]}
    for added in source.get("added_tokens", []):
        added["special"] = added["special"] or bool(added["content"].replace("▁", " ").strip())
    markup, plain = (Tokenizer.from_str(json.dumps(source)) for _ in range(2))
    plain.encode_special_tokens = True
    for tokenizer in (markup, plain):
        tokenizer.no_truncation()
        tokenizer.no_padding()

    _check_control_text(plain, never_in_text, source["model"], folder)
    variables = {f"{name}_token": _token_text(config.get(f"{name}_token")) or "" for name in ("bos", "eos", "pad")}
    template = _find_template(folder, config)
    if template is None:
        if any(markup.token_to_id(token) is None for token in (TURN_START, TURN_END)):
            raise ConfigError(
                f"{folder} has no chat template and its vocabulary has no {TURN_START} and {TURN_END}",
                fix=f"add a chat_template.jinja to {folder}, or train a tokenizer (tokenization.base_model: null)",
            )
        template = CHAT_TEMPLATE
    eos_id = markup.token_to_id(variables["eos_token"] or TURN_END)
    if eos_id is None:
        raise ConfigError(
            f"the eos token {variables['eos_token']!r} of {folder} is not in its vocabulary",
            fix=f"set eos_token in {folder / 'tokenizer_config.json'} to the token that ends a reply",
        )
    document_end = markup.token_to_id(DOCUMENT_END)
    document_end = eos_id if document_end is None else document_end
    own_start = markup.encode("", add_special_tokens=True).ids
    pad_id = markup.token_to_id(variables["pad_token"] or PAD)
    found = ChatTokenizer(
        markup=markup,
        plain=plain,
        template=template,
        variables=tuple(sorted(variables.items())),
        origin=f"chat template of {folder}",
        end_of_turn_id=_end_of_turn(template, variables, markup, folder),
        pad_id=document_end if pad_id is None else pad_id,
        document_start_id=own_start[0] if own_start else document_end,
        document_end_id=document_end,
    )
    _check_generation_prompt(found)
    return found


def encode_dialogue(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a dialogue that ends on an assistant turn, and where they are trained.

    Returns:
        ids int64 (T,) and mask bool (T,), True at assistant contents and at the end-of-turn token after each.
    """
    return assemble_dialogue(tokenizer, messages, [tokenizer.encode_text(m["content"]) for m in messages])


def assemble_dialogue(
    tokenizer: ChatTokenizer, messages: Sequence[Message], contents: Sequence[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """`encode_dialogue` with the contents encoded already (in a batch)."""
    ids: list[int] = []
    mask: list[bool] = []
    turn = 0
    ends_reply = False
    row_end = 0
    for text, is_markup in tokenizer.layout(messages, add_generation_prompt=False):
        if is_markup:
            tokens = tokenizer.markup_tokens(text)
            trained = [False] * len(tokens)
            if ends_reply:
                trained[0] = True
                row_end = len(ids) + 1
        else:
            tokens = contents[turn]
            trained = [text == "assistant"] * len(tokens)
            turn += 1
        ends_reply = not is_markup and text == "assistant"
        ids += tokens
        mask += trained
    return np.array(ids[:row_end], dtype=np.int64), np.array(mask[:row_end], dtype=bool)


def encode_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> np.ndarray:
    """Ids int64 (T,) of a dialogue that ends on a user turn, up to where the reply begins."""
    return assemble_prompt(tokenizer, messages, [tokenizer.encode_text(m["content"]) for m in messages])


def assemble_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message], contents: Sequence[list[int]]) -> np.ndarray:
    """`encode_prompt` with the contents encoded already."""
    ids: list[int] = []
    turn = 0
    for text, is_markup in tokenizer.layout(messages, add_generation_prompt=True):
        ids += tokenizer.markup_tokens(text) if is_markup else contents[turn]
        turn += not is_markup
    return np.array(ids, dtype=np.int64)


def fit_prompt(
    tokenizer: ChatTokenizer, messages: Sequence[Message], max_tokens: int
) -> tuple[np.ndarray, list[Message]] | None:
    """A prompt within `max_tokens`, its oldest turns left out whole where needed; a system turn stays.

    Returns:
        (ids, the messages kept), or None if even the last user turn does not fit.
    """
    for kept in shorter(messages):
        ids = encode_prompt(tokenizer, kept)
        if len(ids) <= max_tokens:
            return ids, kept
    return None


def shorter(messages: Sequence[Message]) -> list[list[Message]]:
    """The dialogue and ever shorter ends of it: each starts on a user turn, after the system turn if there is one."""
    system = [m for m in messages[:1] if m["role"] == "system"]
    turns = messages[len(system) :]
    return [[*system, *turns[start:]] for start, turn in enumerate(turns) if turn["role"] == "user"]


def token_bytes(tokenizer: ChatTokenizer) -> np.ndarray:
    """UTF-8 bytes that each id stands for, int64 (vocabulary,); control tokens stand for none."""
    source = json.loads(tokenizer.markup.to_str())
    byte_level = "ByteLevel" in json.dumps([source.get("pre_tokenizer"), source.get("decoder")])
    sizes = np.zeros(max(tokenizer.markup.get_vocab().values()) + 1, dtype=np.int64)
    for token, index in tokenizer.markup.get_vocab(with_added_tokens=False).items():
        if byte_level:
            sizes[index] = len(token)
        elif token.startswith("<0x") and token.endswith(">"):
            sizes[index] = 1
        else:
            sizes[index] = len(token.replace("▁", " ").encode())
    for added in source.get("added_tokens", []):
        sizes[added["id"]] = 0
    return sizes


# ── templates ───────────────────────────────────────────────────────────────────────────────────────────


def _marker(turn: int) -> str:
    """Stands for a content while the template is split: private-use characters, which no template writes."""
    return f"\ue000{turn}\ue001"


@lru_cache(maxsize=4096)
def _layout(
    template: str, roles: tuple[str, ...], generation: bool, variables: tuple[tuple[str, str], ...], origin: str
) -> tuple[Segment, ...]:
    messages = [{"role": role, "content": _marker(turn)} for turn, role in enumerate(roles)]
    rest = _render_text(template, messages, generation, variables, origin)
    pieces: list[Segment] = []
    for turn, role in enumerate(roles):
        before, found, rest = rest.partition(_marker(turn))
        if not found or _marker(turn) in rest:
            raise ConfigError(
                f"the chat template does not write the {role} content of turn {turn + 1} exactly once",
                where=origin,
                fix="use a base model whose template writes each message once, in order",
            )
        pieces += [(before, True), (role, False)]
    pieces.append((rest, True))
    return tuple(piece for piece in pieces if piece[0])


def _fill(layout: Sequence[Segment], contents: Sequence[str]) -> list[Segment]:
    remaining = iter(contents)
    return [(text, True) if is_markup else (next(remaining), False) for text, is_markup in layout]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _render_text(
    template: str, messages: Sequence[Message], generation: bool, variables: tuple[tuple[str, str], ...], origin: str
) -> str:
    try:
        return _compiled(template).render(messages=list(messages), add_generation_prompt=generation, **dict(variables))
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the chat template cannot be rendered: {error}",
            where=origin,
            why=f"roles {[m['role'] for m in messages]}",
            fix="use a base model whose template takes these roles",
        ) from None


def _end_of_turn(template: str, variables: dict[str, str], tokenizer: Tokenizer, folder: Path) -> int:
    """The control token right after an assistant's content. Raises ConfigError if there is none."""
    layout = _layout(
        template, ("user", "assistant"), False, tuple(sorted(variables.items())), f"chat template of {folder}"
    )
    after = layout[-1][0] if layout[-1][1] else ""
    tokens = tokenizer.encode(after, add_special_tokens=False).ids
    controls = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    if not tokens or tokens[0] not in controls:
        raise ConfigError(
            f"the chat template writes {after[:20]!r} after a reply, which does not start with a control token",
            where=f"chat template of {folder}",
            why="without one the model never learns to end a reply",
            fix="use a base model whose template ends a reply with a special token",
        )
    return tokens[0]


def _check_control_text(plain: Tokenizer, controls: set[int], model: dict[str, Any], folder: Path) -> None:
    """A control token's text must not give its id: models with the text among their own pieces may choose it."""
    unknown = model.get("unk_token")
    allowed = {model.get("unk_id"), None if unknown is None else plain.token_to_id(unknown)}
    tokens = [token.content for token in plain.get_added_tokens_decoder().values() if token.special]
    texts = [text for token in tokens for text in (token, f" {token}", f"a{token}b")]
    for text, found in zip(texts, plain.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        if forged := (controls - allowed) & set(found.ids):
            raise ConfigError(
                f"the tokenizer of {folder} turns the text {text!r} into the control token {forged.pop()}",
                why="its model has the control token among its pieces, so that any user could forge a turn",
                fix="use a base model with a byte-level BPE tokenizer",
            )


def _check_generation_prompt(tokenizer: ChatTokenizer) -> None:
    """What generation starts from must be what training showed before a reply."""
    user, reply = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
    prompt = encode_prompt(tokenizer, [user])
    ids, mask = encode_dialogue(tokenizer, [user, reply])
    start = int(np.argmax(mask))
    if start != len(prompt) or not np.array_equal(ids[:start], prompt):
        raise ConfigError(
            "the chat template's generation prompt differs from what precedes a reply in a full dialogue",
            where=tokenizer.origin,
            why="a model would be asked to answer from a text it was never trained on",
            fix="use a base model whose template agrees with itself",
        )


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is a string or `{"content": …}`."""
    return value.get("content") if isinstance(value, dict) else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON", why=str(error), fix=f"restore {path}") from None
    return found if isinstance(found, dict) else {}
