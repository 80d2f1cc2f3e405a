"""Whatever moves whenever: a group is found hanging if, and only if, it stood still for as long as it may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.hangs.policy import LOOKS_A_BOUND, HangMachine, HangPolicy, Signal, Verdict

START, END = 100.0, 400.0
Move = tuple[float, Signal]

policies = st.builds(
    HangPolicy,
    hang_timeout_s=st.floats(1, 50),
    start_timeout_s=st.none() | st.floats(1, 100),
    pattern=st.just("x"),
    progress_every_s=st.none() | st.floats(1, 50),
    signals=st.none() | st.sets(st.sampled_from(Signal), min_size=1).map(frozenset),
)
moves = st.lists(st.tuples(st.floats(START, END), st.sampled_from(Signal)), max_size=30)


def stood_still(policy: HangPolicy, seen: dict[Signal, float], began: float | None, now: float) -> bool:
    """The bounds as the documents tell them; the beginning was over when it `began`."""
    hang_s, start_s = policy.hang_timeout_s or 0.0, policy.start_timeout_s
    chosen = [at for signal, at in seen.items() if signal in policy.chosen]
    if not chosen:
        silent = now >= START + (hang_s if start_s is None else start_s)
    elif start_s is None:
        silent = now >= max(chosen) + hang_s
    else:
        silent = now >= max(max(chosen) + hang_s, START + start_s if began is None else began + hang_s)
    if start_s is not None and chosen and began is None and max(chosen) <= START + start_s:
        has_written = Signal.OUTPUT in seen and Signal.OUTPUT in policy.chosen
        silent = silent or (not has_written and now >= max(chosen) + start_s)
    every_s, matched = policy.progress_every_s, seen.get(Signal.PATTERN)
    return silent or (every_s is not None and matched is not None and now >= matched + every_s)


@given(policies, moves, st.booleans())
def test_a_verdict_is_right_and_in_time(
    policy: HangPolicy, moved: list[tuple[float, Signal]], is_sampled: bool
) -> None:
    machine = HangMachine(policy, START, is_sampled=is_sampled)
    began: float | None = None
    while (now := machine.next_deadline()) <= END:
        seen: dict[Signal, float] = {}
        for at, signal in sorted(moved):
            if at <= now:
                seen[signal] = at
        if began is None:  # The first look that shows a mark shows the last of those that came since the look before.
            began = min((seen[mark] for mark in (Signal.PATTERN, Signal.PROGRESS) if mark in seen), default=None)
        before = now - 1e-6
        commands = machine.step(seen, now)
        assert now < machine.next_deadline() or any(isinstance(command, Verdict) for command in commands)
        is_hung = any(isinstance(command, Verdict) for command in commands)
        assert is_hung == stood_still(policy, seen, began, now)
        if is_hung:
            # Nobody is found later than a look after the bound was broken.
            limits = (policy.hang_timeout_s, policy.start_timeout_s, policy.progress_every_s)
            slack = min(limit for limit in limits if limit is not None) / LOOKS_A_BOUND if is_sampled else 0.0
            earlier = {signal: at for signal, at in seen.items() if at <= before - slack}
            assert earlier != seen or not stood_still(policy, earlier, began, before - slack)
            return
