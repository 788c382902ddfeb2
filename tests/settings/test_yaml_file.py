"""How a YAML file of settings is read, and what is refused in it, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.settings.yaml_file import PlainDumper, load_yaml, parse_yaml, read_yaml


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key_knows_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a: 1\nb:\n  c: {d: 2}\n  e:\n    - f: 3\n    - 4\n")
    assert read_yaml(path).lines == {
        "a": 1,
        "b": 2,
        "b.c": 3,
        "b.c.d": 3,
        "b.e": 4,
        "b.e[0]": 5,
        "b.e[0].f": 5,
        "b.e[1]": 6,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.e-4", 1e-4),
        ("2.5E3", 2500.0),
        ("-1e+2", -100.0),
        ("'1e-4'", "1e-4"),
        ("2026-11-21", "2026-11-21"),
        ("1e", "1e"),
        ("[1e-4, {a: 1e2}]", [1e-4, {"a": 100.0}]),
        ("", None),
    ],
)
def test_numbers_with_an_exponent_are_numbers_and_dates_are_texts(text: str, value: object) -> None:
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


@pytest.mark.parametrize("value", ["1e-4", "2026-11-21", "12", "null", "on", 1e-5, 1e20, None, 3])
def test_what_is_dumped_reads_back_as_itself(value: object) -> None:
    text = yaml.dump({"key": value}, Dumper=PlainDumper)
    assert parse_yaml(text) == {"key": value}


def test_a_merge_may_override_what_it_merges(tmp_path: Path) -> None:
    path = write(tmp_path, "base: &base {a: 1, b: 2}\nrun: {<<: *base, b: 3}\n")
    assert load_yaml(path)["run"] == {"a": 1, "b": 3}
    path = write(tmp_path, "x: &x {a: 1}\ny: &y {a: 2, b: 2}\nrun: {<<: [*x, *y], c: 3}\n")
    assert load_yaml(path)["run"] == {"a": 1, "b": 2, "c": 3}


def test_words_that_yaml_reads_as_true_are_names_as_keys() -> None:
    assert parse_yaml("{on: 1, no: 2, 3: 4}") == {"on": 1, "no": 2, 3: 4}


def test_all_keys_given_twice_are_found_with_their_lines(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\na: 3\n"))
    assert file.values == {"a": 1, "b": {"c": 1}}
    assert [(problem.key, problem.place) for problem in file.problems] == [
        ("b.c", f"{file.path}:4"),
        ("a", f"{file.path}:5"),
    ]
    with pytest.raises(ConfigError, match=r"b\.c is given twice, on lines 3 and 4; remove one"):
        load_yaml(file.path)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("- a\n", "the file is a list, but must be a mapping", 1),
        ("word\n", "the file is a single value ('word'), but must be a mapping", 1),
        ("a: 1\nb: [", "this is not YAML: ", 2),
        ("a: 1\nb: c: d", "mapping values are not allowed here", 2),
        ("a:\n\tb: 1", "indent with spaces", 2),
        ("a: !!python/object/apply:os.getcwd []", "tag !!python/object/apply:os.getcwd is ref", 1),
        ("a: 1\n!!python/name:os.system : 2", "the YAML tag !!python/name:os.system is refused", 2),
        ("a: !mine 3", "the YAML tag !mine is refused; a run file holds plain values only", 1),
        ("a: 1\n{b}: 2", "a key is a list or a mapping, but must be a name", 2),
        ("a: 1\nb: &b [*b]", "a YAML alias contains itself", 2),
        ("a: &a {<<: *a}", "a YAML alias contains itself", 1),
        ("a: {<<: 3}", "'<<' merges mappings only, not 3", 1),
        (BOMB, "stands for more than 50000 values", 1),
        (MERGE_BOMB, "stands for more than 50000 values", 1),
        ("a: " + "[" * 200, "nested too deeply", None),
        ("a: 1\n---\nb: 2", "but found another document", 2),
        ("a: 1\nb: x\0y", "this is not YAML: it has the character 0x0000.", 2),
        ("a: 0b_", "this is not YAML", None),
        ('a: 1\nb: "x\\0"', "the text 'x\\x00' has a null character, which no name can hold", 2),
        ("a: !!bool maybe", "this is not YAML: 'maybe'", None),
        ("a: !!map 3", "the YAML tag !!map is refused", 1),
        ("a: !!str [3]", "the YAML tag !!str is refused", 1),
    ],
)
def test_what_is_no_plain_mapping_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str, line: int | None
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    assert message in str(error.value)
    assert len(str(error.value)) < 300
    place = error.value.problems[0].place if hasattr(error.value, "problems") else error.value.place
    assert place == (f"{path}:{line}" if line else str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.yaml: No such"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="is a directory; name the YAML file itself"):
        load_yaml(tmp_path)
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    with pytest.raises(ConfigError, match=r"not a text in UTF-8 \(byte 2 is 0xff\)"):
        load_yaml(tmp_path / "binary")


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path, "# only a comment\n")) == {}
