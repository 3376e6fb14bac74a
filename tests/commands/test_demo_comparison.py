"""Speed-ups of the demo on machines with other load: measured, printed or withheld."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from specdec_fast import Engine, SamplingParams
from specdec_fast.commands import demo_comparison, demo_view
from specdec_fast.commands.demo_comparison import Comparer, Comparison, spread, summary
from specdec_fast.commands.prompts import WorkItem
from specdec_fast.commands.terminal_output import make_console
from specdec_fast.drafters.draft_model import DraftModelDrafter
from specdec_fast.engine.request import Handle
from specdec_fast.engine.stats import RequestStats
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.tiny_models import tiny_model

HEADER = {"rule": "replay", "dtype": "float32", "threads": 2}
TAU = 3.0
TOKENS = 48


def measured(
    plain: Sequence[float], speculative: Sequence[float], name: str = "prose", temperature: float = 0.0
) -> Comparison:
    """A text of 48 tokens at tau 3 that took these seconds in each round."""
    params = SamplingParams(temperature=temperature)
    handles = []
    for steps in (TOKENS, int(TOKENS / TAU)):
        stats = RequestStats(steps=steps, new_tokens=TOKENS)
        handles.append(Handle(0, [1], params, 4, tokens=[*range(TOKENS)], origins=["plain"] * TOKENS, stats=stats))
    return Comparison(WorkItem(name, "text", "x"), params, *handles, [*plain], [*speculative])


def shown(done: list[Comparison], **header: Any) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        demo_view.print_conclusion(console, done, HEADER | header)
    return " ".join(captured.get().split())


# What the demo printed at tau 3 on a busy machine, one round each: the plain run stood still for a while.
@pytest.mark.parametrize("ratio", [23.0, 8.0, 88.0])
def test_a_ratio_that_tau_cannot_explain_is_withheld(ratio: float) -> None:
    quiet = [measured([2.0], [1.0], f"quiet-{at}") for at in range(7)]
    found = summary([measured([ratio], [1.0])])
    assert found["speedup"] is None and found["speedup_rounds"] == [[ratio]]
    assert (
        found["speedup_doubt"]
        == f"the measured ratio is {ratio:.1f}x, but 3.00 tokens per target pass allow at most 4.00x"
    )
    text = shown([*quiet, measured([ratio], [1.0])])
    assert f"prose greedy {TOKENS / ratio:.1f} 48.0 ? 3.00" in text, "absolute speeds stay"
    assert f"{ratio:.2f}" not in text
    assert "Other work on this machine disturbs the measurement: run the demo again later, or with --threads 1" in text
    assert '(`make demo DEMO_ARGS="--threads 1"`).' in text


def test_what_tau_explains_is_shown() -> None:
    text = shown([measured([3.9], [1.0])])
    assert "12.3 → 48.0 tokens/s 3.90x, 1 of 1 texts identical to plain decoding" in text
    assert "withheld" not in text


def test_a_stall_in_one_round_changes_no_median() -> None:
    """88x in the first round: its text is marked, and the total stays what the other rounds say."""
    done = [measured([88.0, 2.0, 2.0], [1.0] * 3), *(measured([2.0] * 3, [1.0] * 3, f"quiet-{at}") for at in range(7))]
    assert summary(done)["speedup"] == 2.0
    own = summary(done[:1])
    assert own["speedup"] is None and own["speedup_doubt"] == "the speed-ups of 3 rounds differ by a factor of 44.0"
    assert own["plain_tokens_per_s"] == 24.0
    text = shown(done)
    assert "tok/s: the median of 3 rounds over all texts; tau" in text
    assert "prose greedy 24.0 48.0 ? 3.00" in text and "quiet-0 greedy 24.0 48.0 2.00 3.00" in text
    assert f"?: speed-up withheld for 1 of 8 texts, first prose (greedy): {own['speedup_doubt']}." in text
    assert text.endswith("24 → 48 tokens/s 2.00x, 8 of 8 texts identical to plain decoding")


def test_a_busy_machine_gets_no_ratio_at_all() -> None:
    """One round, ratios that tau explains one by one but that contradict each other."""
    ratios = [3.88, 2.74, 1.42, 0.37, 2.85, 3.7, 2.2, 1.84]
    done = [measured([ratio], [1.0], f"text-{at}") for at, ratio in enumerate(ratios)]
    found = summary(done)
    differ = "the speed-ups of the 8 texts, each divided by its tau, differ by a factor of 2.6"
    reason = f"{differ} even without the highest and the lowest"
    assert found["speedup"] is None and found["speedup_doubt"] == reason
    text = shown(done)
    assert f"Speed-up withheld: {reason}." in text
    assert not any(f"{ratio:.2f}" in text for ratio in ratios), "nothing says which of them were not disturbed"
    assert text.count(" ? ") == 9
    assert "tok/s: one round; tau" in text
    speeds = r"plain \d+ tokens/s, speculative \d+ tokens/s \(speed-up withheld\)"
    assert "→" not in text
    assert re.search(f"{speeds}, 8 of 8 texts identical to plain decoding$", text)


@pytest.mark.parametrize(
    ("texts", "rounds", "reason"),
    [
        (2, 1, "the speed-ups of the 2 texts, each divided by its tau, differ by a factor of 3.0"),
        (2, 2, "the speed-ups of the 2 texts in 2 rounds, each divided by its tau, differ by a factor of 3.0"),
        (1, 9, "the speed-ups of 9 rounds differ by a factor of 3.0 even without the highest and the lowest"),
        (
            *(8, 2),
            "the speed-ups of the 8 texts in 2 rounds, each divided by its tau, differ by a factor of 3.0 even "
            "without the highest and the lowest 2",
        ),
    ],
)
def test_the_reason_names_the_speed_ups_that_differ(texts: int, rounds: int, reason: str) -> None:
    ratios = [1.0 if at % 2 else 3.0 for at in range(texts * rounds)]
    done = [measured(ratios[at::texts], [1.0] * rounds) for at in range(texts)]
    assert summary(done)["speedup_doubt"] == reason


def test_texts_of_another_tau_are_no_contradiction() -> None:
    """Texts with a higher tau are faster, so ratios to tau are compared."""
    fast, slow = measured([3.0], [1.0]), measured([1.2], [1.0])
    slow.speculative.stats.steps = TOKENS  # tau 1
    assert summary([fast, slow])["speedup_doubt"] is None


@pytest.mark.parametrize(("rounds", "kept"), [([1.0, 1.9], True), ([1.0, 2.1], False), ([1.0, 1.5, 2.1], False)])
def test_rounds_that_differ_by_more_than_twice(rounds: list[float], kept: bool) -> None:
    assert (summary([measured(rounds, [1.0] * len(rounds))])["speedup"] is not None) == kept


def test_a_single_thread_has_no_such_advice() -> None:
    assert "run the demo again later." in shown([measured([88.0], [1.0])], threads=1)


def test_the_spread_leaves_out_an_eighth_at_each_end() -> None:
    assert spread([2.0]) == 1.0
    assert spread([3.0, 1.0]) == 3.0
    assert spread([100.0, *[1.0] * 6, 2.0]) == 2.0
    assert spread([100.0, 100.0, *[1.0] * 6]) == 100.0


@pytest.fixture(scope="module")
def engine() -> Engine:
    target, draft = (HuggingFaceTarget(tiny_model("llama", seed=seed), max_rows=1, max_length=64) for seed in (0, 1))
    return Engine(target, DraftModelDrafter(draft))


class Machine:
    """A clock on which plain requests take 2 seconds, others 1, and all while it is busy 50 times as long."""

    def __init__(self, comparer: Comparer, busy: range) -> None:
        self.comparer, self.busy, self.now = comparer, busy, 0.0
        self.ran: list[str] = []

    def run(self, engine: Engine, item: Any, params: SamplingParams) -> tuple[Handle, float]:
        seconds = 2.0 if engine is self.comparer.plain else 1.0
        seconds *= 50.0 if len(self.ran) in self.busy else 1.0
        self.ran.append(f"{item.id} {'plain' if engine is self.comparer.plain else 'speculative'}")
        one = measured([1.0], [1.0])
        return (one.plain if engine is self.comparer.plain else one.speculative), seconds


def through(engine: Engine, rounds: int, busy: range, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Machine]:
    comparer = Comparer(engine)
    machine = Machine(comparer, busy)
    monkeypatch.setattr(comparer, "_run", machine.run)
    items = [WorkItem(name, "text", "x") for name in "abcd"]
    done = list(comparer.compare(items, SamplingParams()))
    for _ in range(rounds - 1):
        comparer.repeat(done)
    return done, machine


def test_rounds_cover_all_texts_and_alternate_the_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    _, machine = through(engine, 2, range(0), monkeypatch)
    plain, fast = "plain", "speculative"
    first = [("a", plain), ("a", fast), ("b", fast), ("b", plain), ("c", plain), ("c", fast), ("d", fast), ("d", plain)]
    second = [(text, fast if way == plain else plain) for text, way in first]
    assert machine.ran == [" ".join(each) for each in first + second]


def speeds(one: Any) -> tuple[float, float]:
    found = summary([one])
    return found["plain_tokens_per_s"], found["speculative_tokens_per_s"]


@pytest.mark.parametrize("busy", [range(3), range(7), range(9, 14), range(17, 24)])
def test_a_burst_of_other_work_costs_one_round(engine: Engine, busy: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a whole round of three is 50 times as slow: the medians do not change."""
    done, _ = through(engine, 3, busy, monkeypatch)
    assert {speeds(each) for each in done} == {(24.0, 48.0)}
    assert summary(done)["speedup"] == 2.0


def test_requests_are_timed_by_the_clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter([0.0, 4.0, 10.0, 11.0])
    monkeypatch.setattr(demo_comparison, "perf_counter", lambda: next(ticks))
    comparer = Comparer(engine)
    (one,) = comparer.compare([WorkItem("a", "text", [1, 2])], SamplingParams(max_new_tokens=8, temperature=0))
    assert one.plain_seconds == [4.0] and one.speculative_seconds == [1.0]
    assert one.identical and speeds(one) == (2.0, 8.0)


def test_the_table_of_the_demo_has_a_block_per_text(monkeypatch: pytest.MonkeyPatch) -> None:
    done = [measured([2.0], [1.0], "prose-wells"), measured([2.2], [1.0], "code-inventory", temperature=1.0)]

    def shown(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        console = make_console()
        console.file = written = io.StringIO()
        demo_view.print_conclusion(console, done, HEADER)
        return written.getvalue()

    narrow = shown(40)
    assert "…" not in narrow and all(len(line.rstrip()) <= 40 for line in narrow.splitlines())
    flat = " ".join(narrow.split())
    assert "prose-wells mode greedy plain tok/s 24.0 spec. tok/s 48.0 speed up 2.00 tau 3.00" in flat
    assert "code-inventory mode T = 1" in flat and " all plain tok/s " in flat
    assert "plain tok/s" not in " ".join(shown(80).split()), "its columns fit"
