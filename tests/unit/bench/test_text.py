"""Real text: the same on every call, split into seen and unseen, cut to size."""

import pytest

from freetoken.bench.sizing import Sizer
from freetoken.bench.text import TextSource, find_prose, is_text, list_passages


def test_text_is_the_same_for_a_seed_and_other_for_another():
    first, again, other = (TextSource("code", seed).take(5000) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 5000


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_unseen_text_comes_from_passages_that_a_search_never_sees(kind):
    passages = list_passages(kind)
    unseen = [one.name for one in passages if one.is_unseen]
    assert 0.1 < len(unseen) / len(passages) < 0.4
    seen_text = TextSource(kind, 3).take(200_000)
    for line in TextSource(kind, 3, is_unseen=True).take(20_000).splitlines():
        # Licence lines and short phrases are everybody's.
        if len(line) > 110:
            assert line not in seen_text


def test_a_source_does_not_repeat_itself_before_it_has_told_everything():
    source = TextSource("code", 0)
    parts = [source.take(3000) for _ in range(100)]
    assert len(set(parts)) == 100


def test_there_is_prose_for_the_longest_workload():
    assert len(TextSource("prose", 0).take(400_000)) == 400_000


def test_source_code_is_no_prose_but_its_docstrings_are():
    sentence = "This module tells what it is for in several sentences that a person wrote down. " * 4
    source = f'"""{sentence}"""\n\ndef f(x):\n    """{"x = [1, 2, 3]; y = {4: 5} " * 20}"""\n'
    assert find_prose(source) == sentence.strip()


def test_tables_of_numbers_are_no_text():
    assert not is_text("0x00, 0x01, 0x02, 0xFF,\n" * 100)
    assert is_text("def read(path):\n    return path.read_text()\n" * 20)


def count_words(text):
    return len(text.split())


def test_a_cut_is_exact_where_the_engine_counts():
    text = TextSource("code", 4).take(60_000)
    calls = []

    def count(part):
        calls.append(part)
        return count_words(part)

    for wanted in (100, 1000, 4000):
        cut = Sizer(count).cut(text, wanted)
        assert text.startswith(cut)
        assert wanted * 0.99 <= count_words(cut) <= wanted
    assert len(calls) < 20


def test_a_cut_by_estimate_is_near_after_one_reading():
    source, sizer = TextSource("code", 5), Sizer()
    first = source.take(20_000)
    sizer.note(first, count_words(first))
    cut = sizer.cut(source.take(60_000), 1000)
    assert 700 <= count_words(cut) <= 1300


def test_a_text_that_is_too_short_is_given_whole():
    assert Sizer(count_words).cut("one two three", 500) == "one two three"


def test_an_engine_that_stops_counting_leaves_the_estimate():
    cut = Sizer(lambda _: None).cut("word " * 1000, 100)
    assert 50 < count_words(cut) < 200
