"""The detectors on replies of known kind: what each must catch and what it must leave alone."""

from __future__ import annotations

import random

import pytest

from dschat_core.data import flaws

TEXT = """\
i am going to the park with my friends today
do you like to go to the park in the summer
i like to read books and to play the guitar
what do you like to do in your free time
my favorite food is pizza and i like to cook it
are you going to see a movie with your friends
i have two dogs and a cat and i love them
how is the weather in your city today
it is very cold here and i do not like it
i do not know what to do in the summer
"""


@pytest.fixture(scope="module")
def order() -> flaws.WordOrder:
    return flaws.WordOrder([TEXT] * 3)


@pytest.mark.parametrize(
    "text",
    [
        "i like it i like it i like it",
        "yes yes yes yes yes",
        "well, how are you how are you how are",
        "so very good, so very good!",
        "你好吗你好吗你好吗",
        "I agree. i agree! I AGREE",
    ],
)
def test_loops_are_found(text: str) -> None:
    assert flaws.is_looped(text)


@pytest.mark.parametrize(
    "text",
    ["", "no no", "haha haha haha", "that is very very good news", "i like to read and i like to cook too", "你好你好"],
)
def test_natural_repeats_are_not_loops(text: str) -> None:
    assert not flaws.is_looped(text)


def test_loop_share_counts_the_cut_short_last_round() -> None:
    assert flaws.loop_share("a b c a b c a b") == 1.0
    assert flaws.loop_share("x y a b c a b c") == pytest.approx(6 / 8)
    assert flaws.loop_share("one two three four") == 0.0


def test_parroting_needs_most_of_the_reply_to_be_copied() -> None:
    turn = "I think it takes a lot of talent to dance like her"
    assert flaws.is_parroted("it takes a lot of talent to dance", turn)
    assert flaws.is_parroted("I THINK it takes a lot, of talent!", turn)
    assert not flaws.is_parroted("i agree, she trained for years to get there", turn)
    assert not flaws.is_parroted("a lot of it", "what is a lot")
    assert flaws.copied_share("", turn) == 0.0


def test_short_echoes_are_not_parroting() -> None:
    assert not flaws.is_parroted("Hi there!", "hi there")


def test_word_order_ranks_text_below_its_permutations(order: flaws.WordOrder) -> None:
    assert order.rank("i like to go to the park with my friends") == 0.0
    assert order.is_shuffled("friends to with park the my go like i to")
    assert not order.is_shuffled("do you like to read books in the summer")


def test_word_order_abstains_below_five_words(order: flaws.WordOrder) -> None:
    assert order.rank("park the to go") is None
    assert not order.is_shuffled("park the to go")


def test_word_order_recall_and_false_positives_on_text_it_has_seen(order: flaws.WordOrder) -> None:
    dice = random.Random(0)
    lines = TEXT.splitlines()
    shuffled = []
    for line in lines * 5:
        mixed = line.split()
        dice.shuffle(mixed)
        shuffled.append(" ".join(mixed))
    assert sum(map(order.is_shuffled, lines)) == 0
    assert sum(map(order.is_shuffled, shuffled)) >= 0.7 * len(shuffled)


def test_word_order_is_the_same_every_time(order: flaws.WordOrder) -> None:
    text = "summer the in park go to i with friends"
    assert order.rank(text) == flaws.WordOrder([TEXT] * 3).rank(text)


def test_word_order_takes_chinese_by_the_character() -> None:
    chinese = flaws.WordOrder(["我今天很高兴见到你\n你今天过得怎么样\n我喜欢看电影和听音乐"] * 3)
    assert chinese.rank("我今天很高兴见到你") == 0.0
    assert chinese.is_shuffled("到兴很你天见高我今")


def test_find_flaws_names_each_kind_and_nothing_on_a_good_reply(order: flaws.WordOrder) -> None:
    turn = "what do you like to do in your free time"
    assert flaws.find_flaws("i like it i like it i like it", turn, order) == ["loops"]
    assert flaws.find_flaws("you like to do in your free time", turn, order) == ["parroting"]
    assert flaws.find_flaws("guitar the play to like and books read i", turn, order) == ["shuffled"]
    assert flaws.find_flaws("i like to read books and to play the guitar", turn, order) == []


def test_distinct_2() -> None:
    assert flaws.distinct_2(["a b c", "a b d"]) == pytest.approx(3 / 4)
    assert flaws.distinct_2(["one", ""]) == 0.0
