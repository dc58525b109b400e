"""Rule files: what is refused, where, and with which words; nothing but RuleFileError ever comes out."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.errors import RuleFileError
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.packs import pack_directory, pack_names
from gradwatch.rules.problem_codes import CODES, explain
from gradwatch.rules.yaml.size_limits import MAX_BYTES, MAX_DEPTH, MAX_LINES, MAX_NODES
from tests.support.alphabet import UNICODE
from tests.support.examples import examples

HERE = Path(__file__).parent / "rulefiles"
FIXTURES = sorted(path.name for path in HERE.glob("*.bad.yaml"))
PACKAGE = Path(load_rules.__code__.co_filename).parent.parent


def problems_of(text: str, path: str = "<string>", run: str = "") -> RuleFileError | None:
    """The refusal, or None when the text is accepted; anything else that is raised fails the test."""
    try:
        parse_rules(text, path, run)
    except RuleFileError as error:
        return error
    return None


def codes_of(text: str) -> list[str]:
    """The codes of everything wrong with a text, in order."""
    error = problems_of(text)
    return [problem.code for problem in error.problems] if error else []


def rule(body: str) -> str:
    """A file with one rule."""
    return "version: 1\nrules:\n  r:\n    detect: {kind: spike}\n" + "".join(
        f"    {line}\n" for line in body.splitlines()
    )


@pytest.mark.parametrize("name", FIXTURES)
def test_refused_as_expected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each *.bad.yaml is refused with exactly the text beside it: every problem, place, caret and advice."""
    monkeypatch.chdir(HERE)
    with pytest.raises(RuleFileError) as refused:
        load_rules(f"./{name}")
    expected = (HERE / name.replace(".yaml", ".txt")).read_text(encoding="utf-8")
    assert f"{refused.value}\n" == expected


def test_a_column_may_be_measured_only() -> None:
    """A threshold far beyond all that a column can hold is meant so; one just beyond is a mistake."""
    text = "version: 1\nrules: {{r: {{detect: {{kind: {}, of: {}, threshold: {}}}}}}}\n"
    for kind, of, threshold in (
        ("above", "zero_fraction", "1e9"),
        ("below", "norm", "-1e9"),
        ("above", "norm", 1e5),
    ):
        assert codes_of(text.format(kind, of, threshold)) == []
    for kind, of, inside, beyond in (
        ("above", "zero_fraction", 0.99, 1),
        ("below", "moment_cosine", -0.99, -1),
    ):
        assert codes_of(text.format(kind, of, inside)) == []
        assert codes_of(text.format(kind, of, beyond)) == ["GW208"]


def test_carets_stand_under_what_is_wrong() -> None:
    """Line, column and width of a problem cut exactly the offending word out of the source."""
    text = rule("sevrity: info\nfor: ten")
    error = problems_of(text)
    assert error is not None
    words = [p.source[p.column - 1 : p.column - 1 + p.width] for p in error.problems]
    assert words == ["sevrity", "ten"]
    assert [text.splitlines()[p.line - 1] for p in error.problems] == [p.source for p in error.problems]


def test_every_code_is_explained_and_raised() -> None:
    """The catalogue, the codes in the sources and the codes that fixtures raise are the same set (GW3xx are those of
    test files: tests/rule_tests).
    """
    catalogue = {code for code in CODES if not code.startswith("GW3")}
    in_sources = {
        code
        for path in PACKAGE.glob("*/*.py")
        for code in re.findall(r"\bGW\d{3}\b", path.read_text("utf-8"))
    }
    raised = {
        code
        for path in HERE.glob("*.bad.txt")
        for code in re.findall(r"^GW\d{3}", path.read_text("utf-8"), re.MULTILINE)
    }
    assert in_sources == catalogue
    assert raised | {"GW009", "GW202"} == catalogue
    for code, entry in CODES.items():
        assert code in explain(code)
        assert all((entry.title, entry.meaning, entry.example, entry.fix))


def test_explain_says_what_is_near() -> None:
    """An unknown code is a KeyError that names a code like it; case does not matter."""
    assert explain("gw101").startswith("GW101 ")
    with pytest.raises(KeyError, match="did you mean 'GW101'"):
        explain("GW1010")


def test_many_problems_are_cut_off() -> None:
    """A file with hundreds of problems lists the first hundred and says how many more there are."""
    rules = "".join(f"  r{i:03}: {{detect: {{kind: nonfinite}}, x: 1}}\n" for i in range(125))
    error = problems_of("version: 1\nrules:\n" + rules)
    assert error is not None
    assert [p.code for p in error.problems] == ["GW101"] * 100 + ["GW009"]
    assert "25 more" in error.problems[-1].message


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-7", 1e-7),
        ("1e3", 1000.0),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("+7", 7.0),
        ("0x10", 16.0),
        ("0o17", 15.0),
        ("12", 12.0),
    ],
)
def test_numbers_are_what_was_written(written: str, value: float) -> None:
    """Every spelling of a number in YAML 1.2 is that number, 1e-7 and 1e3 included."""
    text = f"version: 1\nrules: {{r: {{detect: {{kind: above, threshold: {written}}}}}}}\n"
    assert parse_rules(text).rule("r").detect.threshold == value


@pytest.mark.parametrize(
    "written",
    [
        "010",
        "1:30",
        "1_000",
        "0b11",
        "12e",
        "1e",
        "0x",
        "--1",
        "10 steps",
        "5%",
        "1,5",
        '"10"',
        "~",
        "",
        "yes",
    ],
)
def test_doubtful_numbers_are_refused_in_place(written: str) -> None:
    """What some YAML readers take for another number, or a person for a unit, is an error at its place."""
    error = problems_of(rule(f"cooldown: {written}"))
    assert error is not None
    assert [(p.line, p.code) for p in error.problems][:1] in ([(5, "GW103")], [(5, "GW005")])


@pytest.mark.parametrize("written", ["no", "on", "yes", "off", "y", "No", "1", '"true"', "null"])
def test_truth_is_true_or_false(written: str) -> None:
    """`no` is neither false nor accepted in silence."""
    assert codes_of(rule(f"enabled: {written}")) == ["GW103"]


@pytest.mark.parametrize("key", ["on", "no", "010", "1:30", "null", "y", "1e3"])
def test_keys_are_text_as_written(key: str) -> None:
    """A key that other readers turn into a truth value or a number is an unknown key, spelled as written."""
    error = problems_of(f"version: 1\n{key}: 1\n")
    assert error is not None
    assert (error.problems[0].code, error.problems[0].line) == ("GW101", 2)
    assert f"'{key}'" in error.problems[0].message


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", ".NaN", "1e999"])
def test_numbers_must_be_finite(number: str) -> None:
    """A threshold that nothing or everything exceeds is refused."""
    text = f"version: 1\nrules: {{r: {{detect: {{kind: above, threshold: {number}}}}}}}\n"
    assert codes_of(text) == ["GW105"]


def test_text_stays_text() -> None:
    """Globs and labels that look like something else are taken as written when they are quoted."""
    text = rule('labels: {code: "010", when: "1:30"}\nexclude: [on, no, "1e3"]')
    found = parse_rules(text).rule("r")
    assert found.labels == {"code": "010", "when": "1:30"}
    assert found.exclude == ("on", "no", "1e3")


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    """A byte order mark at the start and CRLF line ends change nothing, places included."""
    plain = rule("for: x")
    marked = tmp_path / "a.yaml"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode())
    with pytest.raises(RuleFileError) as refused:
        load_rules(marked)
    expected = problems_of(plain)
    assert expected is not None
    assert [(p.line, p.column, p.source) for p in refused.value.problems] == [
        (p.line, p.column, p.source) for p in expected.problems
    ]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, a FIFO without a writer and a NUL in the path are refused at once."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path / "none.yaml", tmp_path, fifo, "a\0b", "", tmp_path / ("x" * 300)):
        with pytest.raises(RuleFileError) as refused:
            load_rules(path)
        assert [p.code for p in refused.value.problems] == ["GW001"], path


def test_utf16_is_named(tmp_path: Path) -> None:
    """A file saved as UTF-16 is refused for that, not for its content."""
    path = tmp_path / "a.yaml"
    path.write_bytes(rule("for: 1").encode("utf-16"))
    with pytest.raises(RuleFileError) as refused:
        load_rules(path)
    assert [p.code for p in refused.value.problems] == ["GW002"]


BOMBS = {
    "open brackets": "[" * 20_000,
    "nested brackets": "a: " + "[" * 40 + "]" * 40,
    "dashes": "- " * 10_000 + "x",
    "question marks": "? " * 10_000,
    "colons": ": " * 10_000,
    "items": "[" + "a," * 15_000 + "]",
    "keys": "{" + "".join(f"k{i}: 1," for i in range(MAX_NODES)) + "}",
    "lines": "\n" * (MAX_LINES + 1),
    "bytes": "#" + "x" * MAX_BYTES,
    "wide characters": "# " + "é" * (MAX_BYTES // 2),
    "directives": "%FOO 1\n" * (MAX_LINES + 1),
}


@pytest.mark.parametrize("name", BOMBS)
def test_work_is_bounded(name: str) -> None:
    """Depth, nodes, lines and bytes beyond the bound are refused as such, whatever else is wrong."""
    assert {"GW003", "GW007"} >= set(codes_of(BOMBS[name])) > set()


def test_bounds_leave_room() -> None:
    """A file just inside the bounds is read: depth, nodes and lines are counted, not guessed."""
    nested = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert codes_of(f"version: 1\nextends: {nested}") == ["GW103"]
    rules = "".join(f"  r{i}: {{detect: {{kind: drift}}}}\n" for i in range((MAX_NODES - 6) // 6))
    assert len(parse_rules("version: 1\nrules:\n" + rules).rules) == (MAX_NODES - 6) // 6
    assert not codes_of("version: 1\n" + "#\n" * (MAX_LINES - 1))


def test_messages_cannot_talk_to_the_terminal() -> None:
    """Whatever a file holds, the report is printable: no escape sequence gets through."""
    for text in ("version: 1\n\x1b[2J: 1", 'version: 1\n"\\x1b[2J": 1', "version: 1\nb\tc: 1", "a: \x07"):
        error = problems_of(text)
        assert error is not None
        assert all(character.isprintable() for character in str(error).replace("\n", ""))


ALPHABET = [
    *"{}[]:,-?&*!|>'\"%@`#~\n\t \x00\x85\u2028\ufeff\\019axyz.eE+_<=é😀",
    *("<<", "!!int", "*a", "&a", "---", "...", "%YAML 1.2", "\ud800", ": ", "- ", "\r", "\n  ", "null", "? "),
    *(".nan", "1e-7", '"\\x00"', "|+2", ">-", "version: 1", "kind: ", "extends: [default]", "detect: {"),
]


def mutant(seeds: list[str], rng: random.Random) -> str:
    """A piece of a real file with up to eight edits: insertions, deletions, moved and replaced text."""
    text = rng.choice(seeds)
    if len(text) > 1_200 and rng.random() < 0.9:
        start = text.rfind("\n", 0, rng.randrange(len(text) - 900)) + 1
        text = "version: 1\nrules:\n" * (rng.random() < 0.5) + text[start : start + 800]
    for _ in range(rng.randint(1, 8)):
        at, to, edit = rng.randrange(len(text) + 1), rng.randrange(40), rng.randrange(4)
        piece = (rng.choice(ALPHABET), "", text[to : to + 60], rng.choice(ALPHABET))[edit]
        text = text[:at] + piece + text[at + (0, to, 0, 1)[edit] :]
    return text


def assault(count: int, seed: int) -> int:
    """Parse mutants; every refusal must point into the text. How many were accepted."""
    rng, accepted = random.Random(seed), 0
    files = [*pack_directory().glob("*.gradwatch.yaml"), *HERE.glob("*.yaml")]
    seeds = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)]
    for i in range(count):
        text = mutant(seeds, rng)
        error = problems_of(text, "m.yaml", "x-debug" if i % 2 else "")
        accepted += error is None
        for problem in error.problems if error else ():
            assert problem.line >= 1, text
            assert problem.column >= 1, text
            assert problem.code in CODES, text
            assert problem.path != "m.yaml" or problem.line <= len(text.splitlines()) + 1, text
            assert "Error)" not in problem.message, text  # a fault of the YAML library, caught by the net
    return accepted


def test_mutants_are_accepted_or_refused() -> None:
    """P25: 1,000 mutated files end in a RuleSet or in problems with places, never in anything else."""
    assert 0 < assault(1_000, seed=25) < 1_000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_mutants_in_full() -> None:
    """P25 in full: 50,000 mutants."""
    assert assault(50_000, seed=2025) > 0


@settings(max_examples=examples(150))
@given(st.text(UNICODE, max_size=200) | st.lists(st.sampled_from(ALPHABET), max_size=60).map("".join))
def test_any_text_is_accepted_or_refused(text: str) -> None:
    """Arbitrary unicode and arbitrary strings of YAML's own signs never raise anything but RuleFileError."""
    problems_of(text)


@settings(max_examples=examples(100))
@given(st.binary(max_size=300))
def test_any_bytes_are_accepted_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Arbitrary bytes in a file are refused with a place."""
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    with pytest.raises(RuleFileError):
        load_rules(path)


@pytest.mark.bench
def test_fifty_milliseconds() -> None:
    """P25: no input takes longer than 50 ms of processor time (best of three), nor do the shipped packs."""
    seconds = {}
    texts = BOMBS | {
        name: (pack_directory() / f"{name}.gradwatch.yaml").read_text(encoding="utf-8")
        for name in pack_names()
    }
    for name, text in texts.items():
        problems_of(text)
        took = []
        for _ in range(3):
            started = time.process_time()
            problems_of(text)
            took.append(time.process_time() - started)
        seconds[name] = min(took)
    assert max(seconds.values()) <= 0.050, seconds
