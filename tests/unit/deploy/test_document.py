"""Reading YAML: places, limits, and what is refused."""

from __future__ import annotations

import time

import pytest

from control_plane.deploy.document import MAX_BYTES, Scalar, Value, read, resolve
from control_plane.deploy.faults import Faults
from omnicore.errors import InvalidRequestError
from tests.unit.deploy.helpers import faults, plan


def only(text: str) -> Value:
    found = Faults()
    (document,) = read(text, found)
    assert not found
    return document


def refusal(text: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read_all(text)
    return caught.value.violations[0].description


def read_all(text: str) -> None:
    found = Faults()
    read(text, found)
    found.stop_if_any()


def test_places_of_values() -> None:
    root = only("# comment\na:\n  - b: 1\n  - 'c d': {e: [x, y]}\n")
    inner = root.map["a"].items[1].map["c d"].map["e"].items[1]
    assert (inner.path, inner.line, inner.where) == ('a[1]["c d"].e[1]', 4, "line 4")
    assert root.path == "deploy_yaml"
    assert root.at("nothing").path == "nothing"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-1", -1), ("1_000", 1000), ("0x10", 16), ("0o17", 15), ("+3", 3),
        ("1.5", 1.5), ("1e-5", 1e-5), ("1.0e3", 1000.0), (".5", 0.5), ("-.inf", float("-inf")),
        ("true", True), ("Yes", True), ("off", False), ("null", None), ("~", None), ("", None),
        ("010", "010"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1.2.3", "1.2.3"), ("a", "a"), ("y", "y"),
        pytest.param("9" * 5000, "9" * 5000, id="long"),
    ],
)  # fmt: skip
def test_plain_scalars(text: str, value: Scalar) -> None:
    resolved = resolve(text)
    assert resolved == value
    assert type(resolved) is type(value)


def test_quoted_scalars_are_text_and_explicit_core_tags_are_fine() -> None:
    assert only('a: "1"\nb: \'true\'\nc: !!str 5\nd: !!int "5"\ne: |\n  x\n').plain() == {
        "a": "1", "b": "true", "c": "5", "d": 5, "e": "x\n",
    }  # fmt: skip


def test_anchors_aliases_and_merge_keys() -> None:
    root = only("base: &b {x: 1, y: {z: 2}}\nuse: {<<: *b, x: 3}\nboth: {<<: [{x: 5}, *b]}\nagain: *b\n")
    assert root.plain()["use"] == {"x": 3, "y": {"z": 2}}
    assert root.plain()["both"] == {"x": 5, "y": {"z": 2}}
    assert root.map["again"].map["y"].map["z"].path == "again.y.z"
    assert root.map["use"].map["y"].map["z"].path == "use.y.z"


def test_a_stage_may_be_an_alias_of_another() -> None:
    pipeline = plan("stages:\n  - &s {stage_id: 0, dtype: bfloat16}\n  - {<<: *s, stage_id: 1}\n")
    assert [stage.engine_args["dtype"] for stage in pipeline.stages] == ["bfloat16", "bfloat16"]


def test_duplicate_keys_are_faults_with_both_lines() -> None:
    assert faults("stages:\n  - stage_id: 0\n    dtype: auto\n    dtype: half\n") == {
        "stages[0].dtype": "line 4: key 'dtype' is given twice, first in line 3"
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "line 2: not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("\tx: 1", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "tag"),
        ("a: !mine 3", "tag !mine is not accepted"),
        ("a: !!int x", "tag"),
        ("a: !!timestamp 2024-01-01", "tag"),
        ("a: *nothing", "has no anchor before it"),
        ("a: &x [*x]", "has no anchor before it, or is inside of it"),
        ("a: {<<: 3}", "<< takes a mapping"),
        ("null: 3", "keys must be text"),
        ("yes: 3", "put it in quotes"),
        ("? [a]\n: 3", "keys must be text"),
        ("1.5: 3", "keys must be text"),
        ('a: "\\ud800"', ""),
        ("\ud800: 1", "not valid Unicode"),
        pytest.param("x" * (MAX_BYTES + 1), "too large", id="long"),
        pytest.param("[" * 900, "nested too deeply", id="deep lists"),
        pytest.param("[" * 100_000, "nest", id="very deep lists"),  # here the parser's own limit may be first
        pytest.param("- " * 100_000, "nested too deeply", id="deep block lists"),
        pytest.param("{a: " * 900, "nested too deeply", id="deep mappings"),
        pytest.param("[" + "1," * 60_000 + "]", "too many values", id="wide"),
    ],
)
def test_unreadable_text_is_refused(text: str, said: str) -> None:
    assert said in refusal(text)


def test_aliases_cannot_blow_up() -> None:
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    start = time.process_time()
    assert "too many values once aliases are written out" in refusal(laughs)
    merges = "a0: &a0 {k: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: *a{i - 1}}}\n" for i in range(1, 60)
    )
    assert "too many values" in refusal(merges) or "nested" in refusal(merges)
    assert time.process_time() - start < 20  # without the limit: for ever


def test_empty_texts() -> None:
    for text in ("", "   \n", "# nothing\n", "---\n", "---\n---\n", "null"):
        assert read(text, Faults()) == []
    assert "empty" in faults("# nothing")["deploy_yaml"]
    assert "expected a mapping" in faults("- 1")["deploy_yaml"]


def test_byte_order_mark_crlf_and_unicode() -> None:
    pipeline = plan("\ufeff# → Ünïcode\r\nstages:\r\n  - stage_id: 0\r\n    model: 模型\r\n")
    assert pipeline.stages[0].model == "模型"


def test_lines_of_several_documents_count_within_each() -> None:
    documents = read("# first\na: 1\n---\n# second\nb: 2\n---\nc: 3\n", Faults())
    assert [document.map[key].where for document, key in zip(documents, "abc", strict=True)] == [
        "document 1, line 2",
        "document 2, line 2",
        "document 3, line 1",
    ]
    (single,) = read("# comment\n---\na: 1\n", Faults())
    assert single.map["a"].where == "line 3"
