"""The text format: every number reads back as itself, every label as it was."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from gradwatch.sinks.prometheus.exposition import WIDTH, Block, Family, Lines, Series, digits, number, render
from gradwatch.sinks.prometheus.metric_catalogue import Metric

GAUGE = Metric("some_ratio", "gauge", 'A "quoted" help\\text\nin two lines.', "nowhere", ("name",))
LABEL_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def read(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples by name and labels, as prometheus_client's own parser sees them."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def same(left: float, right: float) -> bool:
    return left == right or (left != left and right != right)


def test_every_float32_reads_back_as_itself() -> None:
    """Random bit patterns, powers of ten and their neighbours, subnormals, both zeros, NaN, infinities."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    powers = np.array([float(f"1e{e}") for e in range(-45, 39)], np.float32)
    zero, infinity = np.float32(0), np.float32(np.inf)
    edges = [
        powers,
        -powers,
        np.nextafter(powers, zero),
        np.nextafter(powers, infinity),
        [zero, -zero, infinity],
    ]
    values = np.concatenate([bits.view(np.float32), *edges]).astype(np.float32)
    texts = digits(values)
    assert texts.shape == (len(values), WIDTH)
    back = np.array([np.float32(float(bytes(row))) for row in texts])
    assert np.array_equal(back, values, equal_nan=True)


def test_special_numbers_are_spelled_as_the_format_asks() -> None:
    """NaN, +Inf and -Inf; anything else would void the scrape."""
    texts = [bytes(row).strip() for row in digits(np.array([np.nan, np.inf, -np.inf, 0, -0.0], np.float32))]
    assert texts == [b"NaN", b"+Inf", b"-Inf", b"0", b"0"]
    assert [number(x) for x in (float("nan"), float("inf"), -float("inf"), 7, True, 0.5)] == [
        "NaN",
        "+Inf",
        "-Inf",
        "7",
        "1",
        "0.5",
    ]


@given(st.floats())
def test_a_number_means_what_prometheus_client_means(value: float) -> None:
    """Scalars keep all digits of a float64."""
    assert same(float(number(value)), value)
    assert same(float(number(value)), float(floatToGoString(value)))


def test_signalling_nans_and_overflow_warn_nobody() -> None:
    """The endpoint's thread must not print warnings into somebody's training."""
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert bytes(digits(signalling)[0]).strip() == b"NaN"
    assert bytes(digits(np.array([1e300]))[0]).strip() == b"+Inf"


@given(st.dictionaries(LABEL_TEXT, st.floats(width=32), max_size=8), st.data())
@example({'a"b\\c\nd': 1.0, "": 2.0, "\\n": 3.0}, None)
def test_labels_and_values_come_back_from_the_parser(
    values: dict[str, float], data: st.DataObject | None
) -> None:
    """Any label text, any value, any subset present, in one block or one by one: what went in comes out."""
    labels = [(("name", text),) for text in values]
    present = [True if data is None else data.draw(st.booleans()) for _ in values]
    numbers = np.array(list(values.values()), np.float32)
    shown = {
        ("some_ratio", frozenset(pairs)): float(value)
        for pairs, value, there in zip(labels, numbers, present, strict=True)
        if there
    }
    block = Block(Lines("some_ratio", labels), numbers, np.array(present, bool))
    single = [Series("", tuple(key[1]), value) for key, value in shown.items()]
    for family in (Family(GAUGE, [], [block]), Family(GAUGE, single)):
        back = read(render([family]))
        assert back.keys() == shown.keys()
        assert all(same(float(np.float32(back[key])), shown[key]) for key in shown)


def test_help_and_type_come_once_before_their_series() -> None:
    """HELP is escaped; a family without series is not mentioned at all."""
    text = render([Family(GAUGE, [Series("", (("name", "x"),), 1)]), Family(GAUGE)]).decode()
    assert text.splitlines() == [
        '# HELP some_ratio A "quoted" help\\\\text\\nin two lines.',
        "# TYPE some_ratio gauge",
        'some_ratio{name="x"} 1',
    ]
    (family,) = text_string_to_metric_families(text)
    assert family.documentation == GAUGE.help
