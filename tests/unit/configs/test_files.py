"""Text of config files: faults have a place, changes keep the form."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.triton_configs.resolve import ConfigFileError, changed, parse, read


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"any": {},\n  }', "2:3: no JSON"),
        ('{"any": {"a": 1,\n "a": 2}}', "2:2: 'a' is there twice"),
        ("[]", "1:1: is no JSON object"),
        ('{"_note": "x",\n "any": 3}', "2:1: any is no object"),
    ],
)
def test_a_fault_has_a_line(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as e:
        read(path)
    assert str(e.value).startswith(f"{path}:{fault}")


@pytest.mark.parametrize("indent", ["  ", "    "])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_change_keeps_indent_order_unknown_keys_and_end(indent: str, end: str) -> None:
    lines = [
        "{", f'{indent}"_note": "kept",', f'{indent}"M_LEQ_64": {{', f'{indent * 2}"b": 1,', f'{indent * 2}"a": null',
    ]  # fmt: skip
    text = "\n".join([*lines, f"{indent}}}", "}"]) + end
    file = parse(text)
    assert changed(file, file.buckets) == text
    assert changed(file, {"M_LEQ_64": {"b": 2, "a": None}}) == text.replace('"b": 1', '"b": 2')
