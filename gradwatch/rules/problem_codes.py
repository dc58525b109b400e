"""Every problem a rule file can have: a stable code, what it means, an example, and how to fix it.

GW0xx the text cannot be read · GW1xx the shape is wrong · GW2xx the words do not fit together · GW3xx tests of
rule files. A code never changes its meaning; `gradwatch rules explain CODE` prints its entry.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from gradwatch.runtime.spelling import did_you_mean


@dataclass(frozen=True, slots=True)
class Code:
    """One entry: `title` names it, `meaning` says why it is refused, `example` raises it, `fix` says what
    to do.
    """

    code: str
    title: str
    meaning: str
    example: str
    fix: str


_ENTRIES = (
    Code(
        "GW001",
        "the file cannot be read",
        "The file named on the command line or in `extends:` does not exist, is not a regular file, or"
        " may not be read.",
        "extends: [defualt]",
        "Correct the path or the pack's name; paths in `extends:` are relative to the file they stand in.",
    ),
    Code(
        "GW002",
        "not UTF-8",
        "Rule files are UTF-8 text (a byte order mark at the start is ignored).",
        "a file saved as UTF-16 or Latin-1",
        "Save the file as UTF-8.",
    ),
    Code(
        "GW003",
        "too large",
        "A file is bounded in bytes (32 KiB), lines (1,200), keys and values (1,600) and depth (32), so"
        " that a broken or hostile file can never hold up a training job.",
        "version: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
        "Split the file and name the parts in `extends:`.",
    ),
    Code(
        "GW004",
        "forbidden character",
        "Control characters, lone surrogates, byte order marks and exotic line breaks (U+0085, U+2028, a"
        " lone carriage return) are refused, also as escapes inside quotes: they are invisible, and"
        " dangerous in logs and labels.",
        'summary: "red \\x1b[31m"',
        "Delete the character; it is usually pasted in by accident.",
    ),
    Code(
        "GW005",
        "not valid YAML",
        "The text is not YAML 1.2: wrong indentation, a tab, an unclosed bracket or quote, a missing colon.",
        "rules: {a: [1, 2}",
        "Look at the marked place and the line above it; indent with spaces and quote text that holds ':"
        " ' or ' #'.",
    ),
    Code(
        "GW006",
        "not a rule file",
        "The file is empty, or holds a list or a single value; a rule file is a map that starts with"
        " `version: 1`.",
        "- a\n- b",
        "Start with `version: 1`, then `rules:`.",
    ),
    Code(
        "GW007",
        "YAML feature that is not used here",
        "Anchors, aliases, tags, merge keys, keys that are maps or lists, and several documents in one"
        " file make YAML hard to read and dangerous to load; rule files do without.",
        "a: &x 1\nb: *x",
        "Write the value out; use `defaults:`, `groups:` and `extends:` to say something once.",
    ),
    Code(
        "GW008",
        "duplicate key",
        "The same key twice in one map: YAML readers silently keep one of the two, and not all keep the"
        " same.",
        "for: 3\nfor: 5",
        "Delete one of them.",
    ),
    Code(
        "GW009",
        "more problems",
        "So much is wrong that only the first problems are listed.",
        "a file with hundreds of unknown keys",
        "Fix those that are listed, and check again.",
    ),
    Code(
        "GW101",
        "unknown key",
        "A key that means nothing at this place. Nothing is ever ignored in silence: a misspelt threshold"
        " would otherwise leave the default in force.",
        "detect: {kind: above, treshold: 1e3}",
        "Correct the spelling, or move the key to where it belongs.",
    ),
    Code(
        "GW102",
        "missing key",
        "A key that this map cannot do without; for a rule that is `detect` or `when`, unless a file it extends has"
        " that rule.",
        "rules: {exploding: {for: 3}}",
        "Add the key; if you meant to change an inherited rule, check the spelling of its id.",
    ),
    Code(
        "GW103",
        "wrong type",
        "Text where a number is needed, a number where a list is needed, and so on. Nothing is converted:"
        " `no`, `on`, `010`, `1:30` and `10 steps` are text in YAML 1.2.",
        "for: 10 steps",
        "Write the value as the message says: bare numbers without units, true or false, quotes around text.",
    ),
    Code(
        "GW104",
        "not one of the allowed values",
        "The key takes one of a few words, and this is none of them.",
        "severity: fatal",
        "Choose one of the words listed.",
    ),
    Code(
        "GW105",
        "out of range",
        "A number too small, too large or not finite, or a list or a text that is empty or too long.",
        "for: -5",
        "Choose a value in the range given.",
    ),
    Code(
        "GW106",
        "wrong form",
        "Text that must follow a pattern: ids, label names, HOST:PORT, `k in n`.",
        'prometheus: {listen: "29440"}',
        "Follow the form given.",
    ),
    Code(
        "GW107",
        "another version of the language",
        "This gradwatch reads version 1 of the rule language.",
        "version: 2",
        "Write `version: 1`, or install a gradwatch that knows the newer version.",
    ),
    Code(
        "GW201",
        "unknown detector kind",
        "No detector of this kind is built in, and no installed package provides one.",
        "detect: {kind: spkie}",
        "Correct the spelling, or install the package that provides it.",
    ),
    Code(
        "GW202",
        "detector not built yet",
        "The kind belongs to the rule language, but this version cannot evaluate it.",
        "detect: {kind: planned}",
        "Remove the rule, or say `optional: true` (or `enabled: false`): it is then kept and listed as"
        " inactive.",
    ),
    Code(
        "GW203",
        "unknown action",
        "`do:` names something that gradwatch cannot do.",
        "do: [skip]",
        "Choose one of the actions listed.",
    ),
    Code(
        "GW204",
        "unknown sink",
        "`sinks:` names a sink that is not built in and that no installed package provides.",
        "sinks: [promethius]",
        "Correct the spelling, or install the package that provides it.",
    ),
    Code(
        "GW205",
        "unknown group",
        "A rule or a clipping policy names a group that neither this file nor one it extends defines.",
        "groups: [matrixes]",
        "Correct the spelling, or define the group in `groups:`.",
    ),
    Code(
        "GW206",
        "not possible in the backward",
        "`clip: {at: backward}` works on one parameter at a time, as its gradient arrives; this method"
        " needs more than one parameter, or a history that is only known at the step.",
        "clip: {at: backward, total: {method: norm, max_norm: 1.0}}",
        "Use `at: step`, which is right everywhere, or `scope: param`.",
    ),
    Code(
        "GW207",
        "no baseline",
        "`warmup` and `half_life` belong to detectors that learn a baseline; this kind compares with a"
        " constant.",
        "detect: {kind: nonfinite}\nwarmup: 200",
        "Delete the key. `from_step: N` begins to judge at step N; `for: N` is no start delay, but waits for N samples"
        " in a row that breach.",
    ),
    Code(
        "GW208",
        "values that contradict each other",
        "Each value is allowed, but not together: a clear level beyond the threshold, a threshold that the column"
        " cannot cross (a fraction above 20), 5 in 3, an empty interval, a batch to be kept in 0 bytes.",
        "detect: {kind: above, threshold: 10, clear_below: 20}",
        "Change one of the values.",
    ),
    Code(
        "GW209",
        "listed twice",
        "The same action or sink twice in one list; it is not clear which parameters count.",
        "do: [stop, stop]",
        "Keep one of them.",
    ),
    Code(
        "GW210",
        "placeholder that cannot be filled in",
        "Annotations may hold {param}, {where} (the parameter, else the column; of a condition the"
        " rules that hold), {group}, {kind}, {rule},"
        " {value}, {score}, {threshold}, {beyond} (the score in words), {step}, {rank}, {nonfinite}, {numel} and"
        " {count}; anything else in braces is refused now, rather than printed as it stands when the incident happens.",
        'summary: "{parameter} exploded"',
        "Use a known placeholder in single braces, without a format; there are no literal braces.",
    ),
    Code(
        "GW211",
        "an action that is not judged at every step",
        "`skip_step` and `clip` protect every step, and so does any action of a rule on ranks, which has the ranks"
        " exchange at every step; with `every:` above 1 the steps in between go unjudged. A condition (`when:`) is"
        " known as often as the rules it names.",
        "every: 10\ndo: [skip_step]",
        "Write `every: 1` for this rule.",
    ),
    Code(
        "GW212",
        "scope that does not apply",
        "A column such as `total_norm` or `loss` has one value per step and takes no scope, groups or"
        " exclude; and some detectors judge single parameters only, or the whole model only.",
        "detect: {kind: above, of: total_norm, threshold: 1e3}\ngroups: [matrices]",
        "Delete the key, or use `of: norm` with a scope.",
    ),
    Code(
        "GW213",
        "files that extend each other",
        "A file extends itself, directly or through others, or more than 16 files are involved.",
        "extends: [./this-file.gradwatch.yaml]",
        "Remove one of the links.",
    ),
    Code(
        "GW214",
        "reserved label",
        "gradwatch, Prometheus or Alertmanager sets this label itself.",
        "labels: {severity: page}",
        "Choose another name for the label; `severity:` is a key of the rule.",
    ),
    Code(
        "GW215",
        "cannot be carried out",
        "An action that means nothing for what its rule judges, or that no hook could do where it is asked for;"
        " histograms of activations without module taps; a sink that cannot be made of its options, or whose library is"
        " not installed here. `gradwatch run` refuses it too.",
        "rules: {r: {detect: {kind: rank_outlier}, do: [clip: {to: 1.0}]}}",
        "The message names the alternative: another action, another option, or what to install.",
    ),
    Code(
        "GW216",
        "a condition on a rule that judges nothing",
        "`when:` names a rule that neither this file nor one it extends has, or one that is switched off: its"
        " silence would say nothing, so the condition could never be known.",
        "rules: {diverging: {when: {all: [loss-spike, norm-spik]}}}",
        "Correct the id (`gradwatch rules list --rules FILE` shows those there are), or switch that rule on; with"
        " `optional: true` a rule whose condition names one that is off is kept, inactive.",
    ),
    Code(
        "GW217",
        "a condition on itself",
        "`when:` names the rule it belongs to, directly or through the conditions of others, so that none of them"
        " could be evaluated before the other.",
        "rules: {a: {when: {any: [b, norm-spike]}}, b: {when: {not: a}}}",
        "Take one of the ids out; a rule that fires on is kept firing by `keep_firing_for`.",
    ),
    Code(
        "GW218",
        "rules that cannot inhibit",
        "`inhibited_by:` names rules of the same file whose incident this rule is then part of; one that is not"
        " there, that has a condition (`when:`, evaluated after all others), or that is inhibited by this one itself,"
        " cannot be.",
        "norm-spike: {inhibited_by: [total-spike]}",
        "Correct the id, or delete it.",
    ),
    Code(
        "GW219",
        "a rule that cannot be held",
        "`unless:` names rules of the same file while which this one judges nothing. One that is not there, that has a"
        " condition (`when:`), or that waits for this one itself, cannot be named; and a rule that is about NaN and Inf"
        " is never held.",
        "norm-spike: {detect: {kind: spike}, unless: [convreged]}",
        "Correct the id, or delete it.",
    ),
    Code(
        "GW220",
        "a group where globs belong",
        "`exclude:` takes globs on the names of parameters. The name of a group there would be a glob that matches a"
        " parameter of exactly that name, and so nothing.",
        'groups: {embed: {params: ["*embed*"]}}\nrules: {norm-fall: {exclude: [embed]}}',
        "Write the globs of the group, or say with `groups:` which ones the rule is about.",
    ),
    Code(
        "GW301",
        "a series that cannot be read",
        "In a test file the values of a series are written as promtool writes them: numbers, NaN, Inf and _ (missing),"
        " with spaces between; 1x30 is 31 times 1, 1+0.5x9 ten values that grow by 0.5, _x3 three missing ones.",
        'norm: "1x30, 50"',
        "Write one of these forms; at most 100,000 steps.",
    ),
    Code(
        "GW302",
        "no such input",
        "In a test file `input:` names columns, and below them globs on the parameters (or modules, or ranks) of this"
        " test. What follows from other columns, such as rms from norm, is not given but made.",
        'input: {norm: {"encoder.*": "1x30"}}   # params: {decoder.weight: [8, 8]}',
        "Correct the name, or add the parameter to `params:`.",
    ),
    Code(
        "GW303",
        "no such rule",
        "In a test file an event, an action or `only:` names a rule that the rule file under test does not have.",
        "events: [{step: 3, rule: non-finte}]",
        "Correct the id; `gradwatch rules list --rules FILE` shows those there are.",
    ),
    Code(
        "GW304",
        "a test that expects nothing",
        "A test without `events:` and without `actions:` cannot fail.",
        'tests: [{name: quiet, params: {w: [4]}, input: {norm: "1x30"}}]',
        "List the events expected; `events: []` expects none.",
    ),
    Code(
        "GW305",
        "rules that do not fit the test's parameters",
        "A rule or group matches none of the test's parameters, so that its test could not fail. In training such"
        " a rule is switched off with a warning, or refused with `--strict-rules`.",
        "params: {w: [4]}   # the rules ask for groups: [matrices]",
        "Give the test parameters that the rules are about, or mark the rule `optional: true`.",
    ),
)

CODES: dict[str, Code] = {entry.code: entry for entry in _ENTRIES}
"""The catalogue, by code."""


def explain(code: str) -> str:
    """The entry of a code as text for a terminal; KeyError (its message says what is near) for an unknown
    code.
    """
    entry = CODES.get(code.strip().upper())
    if entry is None:
        raise KeyError(f"no such code: {code!r}{did_you_mean(code, CODES)}")
    paragraphs = (
        f"{entry.code} {entry.title}",
        textwrap.fill(entry.meaning, 88),
        textwrap.indent(entry.example, "    "),
        textwrap.fill(f"To fix it: {entry.fix}", 88),
    )
    return "\n\n".join(paragraphs) + "\n"
