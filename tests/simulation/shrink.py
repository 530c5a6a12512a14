"""A shorter story that fails in the same way: delta debugging (Zeller 1999) over actions, then the set-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .setup import Setup
from .story import Add, Step, Story
from .violation import Failure

Fails = Callable[[Story], bool]


def failure_of(story: Story) -> Failure | None:
    """How it fails, or None."""
    try:
        story.run()
    except Failure as failure:
        return failure
    return None


def same_failure(story: Story) -> Fails:
    """Tells whether another story fails by the same kind of failure, known or not as this one is."""
    original = failure_of(story)
    assert original is not None, "the story does not fail"

    def fails(other: Story) -> bool:
        failure = failure_of(other)
        return type(failure) is type(original) and failure is not None and failure.known == original.known

    return fails


def shrink(story: Story, fails: Fails | None = None) -> Story:
    """The shortest story found that still fails; each step of the way fails too."""
    fails = fails or same_failure(story)
    before = None
    while before != story:
        before = story
        story = _fewer_actions(story, fails)
        story = _first_that_fails(story, fails, _plainer_setups)
        story = _first_that_fails(story, fails, _plainer_actions)
    return story


def _fewer_actions(story: Story, fails: Fails) -> Story:
    chunk = max(len(story.actions) // 2, 1)
    while True:
        start = 0
        while start < len(story.actions):
            shorter = replace(story, actions=story.actions[:start] + story.actions[start + chunk :])
            if fails(shorter):
                story = shorter
            else:
                start += chunk
        if chunk == 1:
            return story
        chunk //= 2


def _first_that_fails(story: Story, fails: Fails, candidates: Callable[[Story], Iterator[Story]]) -> Story:
    """Takes every candidate that still fails, until none is left."""
    again = True
    while again:
        again = False
        for candidate in candidates(story):
            if candidate != story and fails(candidate):
                story, again = candidate, True
                break
    return story


def _plainer_setups(story: Story) -> Iterator[Story]:
    plain = Setup(mode=story.setup.mode)
    for name in story.setup.differs():
        if name == "unsupported":
            continue
        if name == "options":
            options = story.setup.options
            yield from (
                story.with_setup(options={k: v for k, v in options.items() if k != key}) for key in options
            )
        elif name != "mode":
            yield story.with_setup(**{name: getattr(plain, name)})
    if story.setup.ranks > 2:
        yield story.with_setup(ranks=2)


def _plainer_actions(story: Story) -> Iterator[Story]:
    for i, action in enumerate(story.actions):
        plainer = []
        if isinstance(action, Add):
            plainer = [replace(action, letters=action.letters[:-1])] if len(action.letters) > 1 else []
            plainer += [
                replace(action, tokens=1),
                replace(action, tail=1),
                replace(action, mark=0, salt=None),
                replace(action, priority=0),
            ]
        elif isinstance(action, Step) and action.count > 1:
            plainer = [Step(1), Step(action.count - 1)]
        for other in plainer:
            yield replace(story, actions=(*story.actions[:i], other, *story.actions[i + 1 :]))


def report(story: Story) -> str:
    """The story, as a program and as it went."""
    from .story import start

    world = start(story.setup, verbose=True)
    failure = None
    try:
        story.play(world)
    except Failure as caught:
        failure = caught
    end = f"{type(failure).__name__}: {failure}" if failure is not None else "It does not fail."
    return f"{story}\n\n{world.story()}\n\n{end}"
