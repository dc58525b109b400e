"""Names in the package use torch's and Prometheus' terms; words that an earlier design made up do not come back."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwatch
from tests.test_layers import SOURCES, nodes, parsed

PACKAGE = Path(gradwatch.__file__).parent

RETIRED = {
    "lane": "OptimizerCapture, captured",
    "lanes": "captures",
    "course": "OptimizerRules, bound_rules",
    "courses": "RuleBindings, rule_bindings",
    "seat": "RankMembership, membership",
    "vitals": "CheckpointHealthTracker, health_tracker",
    "tainted": "spans_two_steps",
    "undisturbed": "state_restored",
    "remark": "reinstall",
    "surroundings": "nothing: the boundary calls down",
    "courier": "BackgroundWorker, background_worker",
    "limiter": "BackwardClipper, clipper",
    "tally": "RunTotals, run_totals",
    "tallies": "totals_by_index",
    "faint": "may_underflow",
    "overheard": "PreClipReading",
    "habit": "AccumulationSchedule",
    "parting": "replica_divergence",
    "whereabouts": "module_attribution",
    "nearby": "caller_scope",
    "told": "what it is: ReducedFacts, an Order, a line of the account",
    "tell": "notify, report, emit, share",
    "tells": "shows",
    "telling": "shows",
    "heard": "ArrivalCounts, norms_from_hooks, was_called",
    "hear": "add_arrivals, expect, listen",
    "hears": "can_be_reached",
    "hearing": "listeners",
    "deaf": "is_over",
    "calm": "deferrable, ordinary, cannot_breach",
    "settle": "close_window, flush, wait_for",
    "settled": "closed_at",
    "spoilt": "nonfinite_statistics",
    "standing": "ClipSection, clip_section",
    "glance": "quick_total, check_if_due",
    "sentinels": "kept_hooks, WriteProbes",
    "thinned": "pruned",
    "thin": "prune",
    "marks": "GradReadyHooks, grad_ready",
    "witness": "zero_grad_probe",
    "torn": "sharded",
    "twin": "unsharded",
    "parted": "diverged",
    "withheld": "shadowed",
    "announced": "KnownScaling, known_scalings",
    "harshest": "first_crossed",
    "easiest": "first_crossed",
    "remedy": "Suggestion",
    "remedies": "suggestions",
    "mend": "fix",
    "holding": "ModelRecorder, recording",
    "holdings": "recordings",
    "lasting": "final_families",
    "unfed": "RulesWithoutData, without_data",
    "unmarked": "ManualGradients, backwards_without_hook",
    "unmoved": "UnoptimizedWeights",
    "unannounced": "WithoutOptimizer",
    "fed": "with_data, evaluated",
    "sheet": "RowBuffer, row_buffer",
    "shipment": "PeriodicExport, export",
    "resting": "idle",
    "solitary": "needs_no_ranks",
    "born": "attached_mid_window, opened_at",
    "card": "hello",
    "wants": "RankRequirements, rank_requirements",
    "forget": "discard, reset, remove, release",
    "become": "run_script, exec_command",
    "keeper": "StateLock",
    "arriving": "AsyncCopy, pending",
    "nobody": "the subject: torch, the loop, gradwatch, another rank",
    "somebody": "the subject: torch, the loop, gradwatch, another rank",
    "everybody": "all ranks, all code of the process",
    "anybody": "other code, any user",
    "let_go": "release, dropped_by_script",
    "give_back": "restore",
    "stand_in": "shadow optimizer",
    "may_wait": "deferral_allowed",
}
# Refused in docstrings and comments too; the others are English there ("of course", "what is told to Prometheus").
PROSE = {
    "anybody",
    "courier",
    "deaf",
    "everybody",
    "heard",
    "hears",
    "hear",
    "lane",
    "lanes",
    "nobody",
    "overheard",
    "sentinels",
    "somebody",
}
PROSE |= {
    "tainted",
    "vitals",
    "whereabouts",
    "calm",
    "mends",
    "remedies",
    "spoilt",
    "stranger",
    "unfed",
    "unmoved",
}
KEYS = {"told_by"}  # on disk
# Labels compete for seats; a parameter of a rule; a policy, or a factor, that holds on every step; a frame whose end
# is missing; steps of which a journal keeps fewer.
OTHER_SENSE = {
    "seat": {"sinks/parameter_selection.py"},
    "settle": {"detectors/loss_scale.py"},
    "standing": {"engine/", "records/verdict.py"},
    "torn": {"journal/crash_safe_frames.py"},
    "thin": {"journal/retention.py"},
}


def words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in lower case, and each two that follow each other."""
    found = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return {*found, *map("_".join, itertools.pairwise(found))}


def retired_in(source: str) -> Iterator[tuple[int, str]]:
    """Line and retired word of every name, docstring and comment of `source`; keys of formats on disk are strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string not in KEYS:
            found = words(token.string) & RETIRED.keys()
        elif token.type == tokenize.COMMENT or token.string.startswith('"""'):
            found = set(re.findall(r"[a-z]+", token.string)) & PROSE
        else:
            continue
        for word in found:
            yield token.start[0], word


def test_no_retired_word_in_names_docstrings_and_comments() -> None:
    """Every retired word is gone from the package; the message says what to write instead."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        for line, word in retired_in(path.read_text(encoding="utf-8")):
            if not any(map(where.startswith, OTHER_SENSE.get(word, ()))):
                found.append(f"{where}:{line}: '{word}' is now {RETIRED[word]}")
        found += [f"{where}: the file is named '{word}'" for word in words(path.stem) & RETIRED.keys()]
    assert not found, "\n".join(found)


QUESTIONS = {"What", "Whether", "That", "Where", "Who", "Whom", "Whose", "Which", "How", "When", "Why"}


def questions_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and first sentence of every docstring of a module that opens as a question and not with its subject."""
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or " "
            if re.split(r"\W", docstring, maxsplit=1)[0] in QUESTIONS:
                yield getattr(node, "lineno", 1), docstring.splitlines()[0]


def test_docstrings_open_with_an_imperative_or_a_noun() -> None:
    """A docstring says what a thing is or does, in its first words."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {sentence}"
        for path in SOURCES
        for line, sentence in questions_in(parsed(path))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", ['"""What it is."""\n', 'def f():\n    """Whether so."""\n'])
def test_questions_are_seen(source: str) -> None:
    """A module's docstring and a function's count."""
    assert list(questions_in(ast.parse(source)))
    assert not list(questions_in(ast.parse('"""Whatever, and howls."""\n')))


@pytest.mark.parametrize(
    "source",
    [
        "lane = 1\n",
        "class OldCourse: ...\n",
        "# a lane\n",
        '"""Its vitals."""\n',
        "_seat: int\n",
        "has_let_go = 1\n",
    ],
)
def test_retired_words_are_seen(source: str) -> None:
    """A name, a part of one, a comment and a docstring count."""
    assert list(retired_in(source))


@pytest.mark.parametrize("source", ['state["lanes"]\n', "planes = 1\n", '"""Of course."""\n', "seated = 2\n"])
def test_other_words_are_not(source: str) -> None:
    """Keys of saved states, longer words, and English in a docstring do not."""
    assert not list(retired_in(source))
