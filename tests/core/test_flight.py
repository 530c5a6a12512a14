"""The flight: its life as a table, and what it refuses."""

from itertools import product

import pytest

from singleflight.core.flight import FINAL, JOINABLE, TRANSITIONS, Event, Flight, IllegalEvent, State, diagram

# What the design says, written out once more by hand; "-" is an illegal event.
LIFE = """
            LEADER_LEFT  OVERDUE    RESET      CUT        LAND    FAIL
LOADING     ORPHANED     OVERDUE    DISCARDED  LOADING    LANDED  FAILED
ORPHANED    -            OVERDUE    DISCARDED  ORPHANED   LANDED  FAILED
OVERDUE     OVERDUE      OVERDUE    DISCARDED  OVERDUE    LANDED  FAILED
DISCARDED   DISCARDED    -          DISCARDED  DISCARDED  LANDED  FAILED
LANDED      -            -          -          -          -       -
FAILED      -            -          -          -          -       -
"""
_events, *_rows = (line.split() for line in LIFE.strip().splitlines())
LIFE_TABLE = {
    (row[0], event): target for row in _rows for event, target in zip(_events, row[1:], strict=True)
}


def a_flight(state: State = State.LOADING) -> Flight:
    flight = Flight(7, "leader", ["h1", "h2"], ["d1", "d2"], started=1.5, miss="h4", hit="h3")
    flight.followers["f"] = 2
    flight.fan_in = 2
    flight.state = state
    return flight


def picture(flight: Flight) -> dict[str, object]:
    return {slot: repr(getattr(flight, slot)) for slot in Flight.__slots__}


class TestInit:
    def test_starts_loading_with_its_leader_as_the_only_member(self):
        flight = Flight(1, "leader", ["h1", "h2"], ["d1", "d2"], 0.0)
        assert (flight.state, flight.fan_in, flight.followers) == (State.LOADING, 1, {})
        assert flight.joinable
        assert (flight.hit, flight.miss) == (None, None)

    def test_keeps_its_own_copy_of_the_blocks(self):
        hashes, destination = ["h1", "h2"], [1, 2]
        flight = Flight(1, "leader", hashes, destination, 0.0)
        hashes.clear()
        destination.clear()
        assert (flight.hashes, flight.destination) == (("h1", "h2"), (1, 2))

    @pytest.mark.parametrize(
        ("hashes", "destination", "says"),
        [
            (["h1"], [], "1 hashes but 0 destinations"),
            (["h1"], [1, 2], "1 hashes but 2 destinations"),
            ([], [], "at least one block"),
        ],
    )
    def test_blocks_without_their_destination_are_refused(self, hashes, destination, says):
        with pytest.raises(ValueError, match=says):
            Flight(1, "leader", hashes, destination, 0.0)


class TestApply:
    def test_the_hand_written_table_covers_every_pair(self):
        assert set(LIFE_TABLE) == {(s.name, e.name) for s, e in product(State, Event)}

    @pytest.mark.parametrize(("state", "event"), list(product(State, Event)), ids=lambda x: x.name)
    def test_every_pair_of_state_and_event(self, state, event):
        flight = a_flight(state)
        before = picture(flight)
        target = LIFE_TABLE[state.name, event.name]
        if target == "-":
            with pytest.raises(IllegalEvent, match=f"{event.value!r} in state {state.value!r}"):
                flight.apply(event)
            assert picture(flight) == before
        else:
            assert flight.apply(event) is State[target]
            assert picture(flight) == before | {"state": repr(State[target])}

    def test_final_states_are_those_without_a_way_out(self):
        assert set(State) - {state for state, _ in TRANSITIONS} == FINAL

    def test_the_table_is_read_only(self):
        with pytest.raises(TypeError):
            TRANSITIONS[State.LANDED, Event.FAIL] = State.FAILED  # type: ignore[index]


class TestCut:
    def test_the_first_blocks_stay_and_the_hashes_of_the_others_come_back(self):
        flight = a_flight()
        assert flight.cut(1) == ("h2",)
        assert (flight.hashes, flight.destination, flight.state) == (("h1",), ("d1",), State.LOADING)
        assert (flight.hit, flight.miss) == (None, None), "h3 and h4 came after h2"

    @pytest.mark.parametrize("blocks", [-1, 0, 3])
    def test_to_no_block_or_more_than_there_are_is_refused(self, blocks):
        flight = a_flight()
        before = picture(flight)
        with pytest.raises(ValueError, match=f"to {blocks} blocks"):
            flight.cut(blocks)
        assert picture(flight) == before

    @pytest.mark.parametrize("state", sorted(FINAL, key=lambda s: s.name))
    def test_what_has_ended_is_not_cut(self, state):
        flight = a_flight(state)
        before = picture(flight)
        with pytest.raises(IllegalEvent):
            flight.cut(1)
        assert picture(flight) == before


class TestJoinable:
    @pytest.mark.parametrize("state", list(State), ids=lambda s: s.name)
    def test_only_while_the_load_is_expected_to_serve_newcomers(self, state):
        assert a_flight(state).joinable is (state in {State.LOADING, State.ORPHANED})

    def test_what_cannot_be_joined_never_becomes_joinable_again(self):
        assert not [pair for pair, to in TRANSITIONS.items() if to in JOINABLE and pair[0] not in JOINABLE]


class TestRepr:
    def test_names_what_a_log_reader_needs(self):
        assert repr(a_flight()) == "<Flight #7 loading leader='leader' blocks=2 followers=['f']>"


class TestDiagram:
    def test_has_a_line_for_each_transition_and_each_end(self):
        lines = [line.strip() for line in diagram().splitlines()]
        assert lines[:2] == ["stateDiagram-v2", "[*] --> LOADING: lead"]
        assert "LOADING --> ORPHANED: leader left" in lines
        assert "OVERDUE --> LANDED: land" in lines
        assert sorted(line for line in lines if line.endswith("[*]")) == ["FAILED --> [*]", "LANDED --> [*]"]
        assert len(lines) == 2 + len(TRANSITIONS) + len(FINAL)
