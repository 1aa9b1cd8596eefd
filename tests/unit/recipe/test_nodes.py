import pytest

from freetoken.errors import BadFileError
from freetoken.recipe.nodes import Mark, parse_value, parse_yaml, read_yaml


def plain(text):
    return parse_yaml(text, "f.yaml").plain()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("NO", "NO"), ("true", True), ("False", False),
        ("~", None), ("", None), ("null", None), ("'~'", "~"), ("'true'", "true"),
        ("08", "08"), ("010", "010"), ("8080", 8080), ("-3", -3), ("0", 0), ("1_000", "1_000"), ("0x10", "0x10"),
        ("1e3", 1000), ("1.5e-3", 0.0015), ("1.0", 1.0), ("8.0", 8.0), ("8.10", "8.10"), (".5", ".5"), ("1.", "1."),
        (".inf", float("inf")), ("1:30", "1:30"), ("2031-01-01", "2031-01-01"), ("6GiB", "6GiB"), ("'>=8.0'", ">=8.0"),
        ("4090", 4090), ("'4090'", "4090"),
    ],
)  # fmt: skip
def test_plain_scalars_mean_what_people_expect(text, value):
    found = plain(f"key: {text}")["key"]
    assert (found, type(found)) == (value, type(value))


def test_every_key_and_value_has_its_place():
    node = parse_yaml("a: 1\nb:\n  c: [2,\n      3]\n", "f.yaml")
    found = {path: (str(leaf.mark), leaf.mark.column) for path, leaf in node.leaves()}
    assert found == {("a",): ("f.yaml:1", 4), ("b", "c"): ("f.yaml:3", 6)}
    assert node.child("b").key_marks["c"] == Mark("f.yaml", 3, 3)
    assert str(node.find(("b", "c", 1))[0].mark) == "f.yaml:4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: `a` is given twice, first in line 1"),
        ("a: {b: 1, b: 2}", "f.yaml:1: `b` is given twice, first in line 1"),
        ("? [1]\n: 2\n", "f.yaml:1: a key must be a plain text"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "f.yaml:3: merge keys (`<<`) are not read; use `extends`"),
        ("a: !!python/object/apply:os.system [ls]\n",
         "f.yaml:1: the tag `tag:yaml.org,2002:python/object/apply:os.system` is not read; only plain YAML is"),
        ("a: !mine 3\n", "f.yaml:1: the tag `!mine` is not read; only plain YAML is"),
        ("a: " + "[" * 30 + "]" * 30, "f.yaml:1: nested deeper than 24 levels"),
        ("a: &a [*a]\n", "f.yaml:1: nested deeper than 24 levels once its aliases are expanded"),
    ],
)  # fmt: skip
def test_what_no_recipe_needs_is_refused_with_its_line(text, message):
    with pytest.raises(BadFileError) as caught:
        plain(text)
    assert caught.value.message == message


def test_all_double_keys_are_told_at_once():
    with pytest.raises(BadFileError) as caught:
        plain("a: 1\na: 2\nb: {c: 1, c: 2}\n")
    assert caught.value.details == ("f.yaml:3: `c` is given twice, first in line 3",)


@pytest.mark.parametrize(
    "text", ["a: [1, 2\nb: 3", "a: b: c", "\ta: 1", "a: 'x", "*nowhere", "a: @x", "a: 1\n---\nb: 2\n"]
)
def test_broken_yaml_is_told_with_line_and_column(text):
    with pytest.raises(BadFileError, match=r"^f\.yaml:\d+:\d+: not YAML: "):
        plain(text)


def test_an_unquoted_minimum_is_told_what_it_lacks():
    with pytest.raises(BadFileError) as caught:
        plain("driver: >=580\n")
    sentence = 'a text that begins with `>` or `|` needs quotes, e.g. `">=8.0"`'
    assert caught.value.message == f"f.yaml:1:10: not YAML: {sentence}"


def test_aliases_are_expanded_and_bounded():
    assert plain("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 8)
    )
    with pytest.raises(BadFileError, match=r"more than 20,000 values once its aliases are expanded"):
        plain(bomb)


def test_files_that_are_none_are_refused(tmp_path):
    big, binary, folder = tmp_path / "big.yaml", tmp_path / "binary.yaml", tmp_path / "folder.yaml"
    big.write_bytes(b"#" * ((1 << 20) + 1))
    binary.write_bytes(b"a: 1\nb: \xff\xfe\n")
    folder.mkdir()
    told = []
    for path in (big, binary, folder, tmp_path / "none.yaml"):
        with pytest.raises(BadFileError) as caught:
            read_yaml(path, path.name)
        told.append(caught.value.message)
    assert told == [
        "big.yaml is larger than 1 MiB, which no recipe, profile or workload needs",
        "binary.yaml:2: not UTF-8 text",
        "folder.yaml is a folder",
        "none.yaml does not exist",
    ]


def test_an_empty_file_is_an_empty_mapping_and_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    (tmp_path / "b.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert (read_yaml(tmp_path / "a.yaml").plain(), read_yaml(tmp_path / "b.yaml").plain()) == ({}, {"a": 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [("8k", "8k"), ("512", 512), ("[a, b]", ["a", "b"]), ("{x: 1}", {"x": 1}), ("", None), ("a: b: c", "a: b: c"),
     ("[--flag", "[--flag"), ("true", True), ("*", "*")],
)  # fmt: skip
def test_a_set_value_is_yaml_or_else_the_text(text, value):
    assert parse_value(text, "--set x").plain() == value
