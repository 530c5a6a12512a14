"""The negative cache: what is remembered, for how long, and that it is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singleflight.core.broken import BrokenKeys

KEYS = ["a", "b", "c", "d", "e"]


class TestFirst:
    @pytest.mark.parametrize(
        ("bad", "start", "stop", "first"),
        [
            ("", 0, 5, 5),
            ("c", 0, 5, 2),
            ("ce", 0, 5, 2),
            ("c", 3, 5, 5),
            ("c", 0, 2, 2),
            ("c", 2, 2, 2),
            ("x", 0, 5, 5),
        ],
    )
    def test_the_first_in_the_range_that_is_asked_about(self, bad, start, stop, first):
        broken = BrokenKeys(10.0)
        broken.failed(bad, now=0.0)
        assert broken.first(KEYS, start, stop, now=1.0) == first

    def test_a_key_is_forgotten_ten_seconds_after_its_last_failure(self):
        broken = BrokenKeys(10.0)
        broken.failed(["a", "b"], now=0.0)
        broken.failed(["a"], now=4.0)
        assert broken.first(KEYS, 0, 5, now=9.9) == 0
        assert broken.first(KEYS, 1, 5, now=10.0) == 5
        assert broken.first(KEYS, 0, 5, now=13.9) == 0
        assert broken.first(KEYS, 0, 5, now=14.0) == 5
        assert len(broken) == 0

    def test_what_has_been_read_or_reset_is_not_broken(self):
        broken = BrokenKeys(10.0)
        broken.failed(["a", "b", "c"], now=0.0)
        broken.read(["a", "x"])
        assert broken.first(KEYS, 0, 5, now=0.0) == 1
        broken.clear()
        assert broken.first(KEYS, 0, 5, now=0.0) == 5

    def test_zero_seconds_remember_nothing(self):
        broken = BrokenKeys(0.0)
        broken.failed(KEYS, now=0.0)
        assert len(broken) == 0

    def test_at_the_bound_the_oldest_go(self):
        broken = BrokenKeys(10.0, most=2)
        broken.failed(["a", "b"], now=0.0)
        broken.failed(["a", "c"], now=1.0)
        assert len(broken) == 2
        assert [broken.first(KEYS, i, i + 1, now=1.0) == i for i in range(3)] == [True, False, True]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("failed"), st.lists(st.sampled_from(KEYS), max_size=4)),
            st.tuples(st.just("read"), st.lists(st.sampled_from(KEYS), max_size=2)),
            st.tuples(st.just("wait"), st.integers(0, 12)),
        ),
        max_size=30,
    )
)
def test_it_is_a_map_from_a_key_to_its_last_failure(events):
    """A plain dict of last failures that is never tidied gives the same answers."""
    broken, last, now = BrokenKeys(10.0), {}, 0.0
    for what, argument in events:
        if what == "wait":
            now += argument
        elif what == "failed":
            broken.failed(argument, now)
            last.update(dict.fromkeys(argument, now))
        else:
            broken.read(argument)
            for key in argument:
                last.pop(key, None)
        bad = [i for i, key in enumerate(KEYS) if now - last.get(key, -10.0) < 10.0]
        for start in range(len(KEYS)):
            expected = min((i for i in bad if i >= start), default=len(KEYS))
            assert broken.first(KEYS, start, len(KEYS), now) == expected
        assert len(broken) <= len(KEYS)
