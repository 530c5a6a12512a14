"""The breaker: its transitions as a table, and what a driver sees of them."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from singleflight.core.breaker import TRANSITIONS, Breaker, Event, State

# Written out once more by hand; "-" is an illegal event.
LIFE = """
           LANDED     FAILED  TRIPPED  COOLED
CLOSED     CLOSED     CLOSED  OPEN     -
OPEN       HALF_OPEN  OPEN    OPEN     HALF_OPEN
HALF_OPEN  CLOSED     OPEN    OPEN     -
"""


def test_the_transitions_are_those_of_the_design():
    (events, *rows) = (line.split() for line in LIFE.strip().splitlines())
    table = {(row[0], event): target for row in rows for event, target in zip(events, row[1:], strict=True)}
    for state, event in product(State, Event):
        found = TRANSITIONS.get((state, event))
        assert (found.name if found else "-") == table[state.name, event.name]


class TestBreaker:
    def opened(self) -> Breaker:
        breaker = Breaker(failures=3, pause_s=30.0)
        for now in (0.0, 1.0, 2.0):
            breaker.failed(now)
        return breaker

    def test_opens_at_the_third_failure_in_a_row(self):
        breaker = Breaker(failures=3, pause_s=30.0)
        for _ in range(4):  # a load that lands in between starts the count anew
            breaker.failed(0.0)
            breaker.failed(0.0)
            assert breaker.allows(0.0)
            breaker.landed()
        for _ in range(3):
            breaker.failed(0.0)
        assert not breaker.allows(0.0)

    def test_after_the_pause_requests_wait_again_on_trial(self):
        breaker = self.opened()
        assert not breaker.allows(31.9)
        assert breaker.allows(32.0)
        assert breaker.state is State.HALF_OPEN
        breaker.failed(33.0)
        assert not breaker.allows(62.9)
        assert breaker.allows(63.0)
        breaker.landed()
        assert breaker.state is State.CLOSED
        breaker.failed(64.0)
        assert breaker.allows(64.0), "one failure is no row"

    def test_a_failure_while_it_is_open_starts_the_pause_anew(self):
        breaker = self.opened()
        breaker.failed(20.0)
        assert not breaker.allows(49.9)
        assert breaker.allows(50.0)

    def test_a_load_that_lands_while_it_is_open_ends_the_pause(self):
        breaker = self.opened()
        breaker.landed()
        assert breaker.allows(2.0)
        assert breaker.state is State.HALF_OPEN

    def test_zero_failures_switch_it_off(self):
        breaker = Breaker(failures=0, pause_s=30.0)
        for _ in range(100):
            breaker.failed(0.0)
        assert breaker.allows(0.0)


@given(
    st.integers(1, 4),
    st.lists(st.one_of(st.sampled_from(["landed", "failed", "ask"]), st.integers(1, 20)), max_size=60),
)
def test_it_is_open_only_after_failures_and_never_for_longer_than_its_pause(failures, events):
    """Whatever happens: who asks is refused only within the pause after a failure, and only if this one was
    the n-th in a row at least or came on trial."""
    breaker, now, last_failure, row, tried = Breaker(failures, 30.0), 0.0, None, 0, False
    for what in events:
        if isinstance(what, int):
            now += what
        elif what == "landed":
            breaker.landed()
            tried = tried or row >= failures
            row = 0
        elif what == "failed":
            breaker.failed(now)
            last_failure, row = now, row + 1
        allowed = breaker.allows(now)
        if not allowed:
            assert last_failure is not None
            assert now - last_failure < 30.0
            assert row >= failures or tried
        if row >= failures:
            assert allowed == (now - last_failure >= 30.0)
