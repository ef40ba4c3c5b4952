"""The pictures of the documentation: what they show is what the results say, and none is missing or old."""

from __future__ import annotations

import json
import re

import pytest
from conftest import ROOT, load_script

SCRIPT = ROOT / "benchmarks" / "pictures.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


pictures = load_script(SCRIPT)


def result(name):
    if not (pictures.RESULTS / name).exists():
        pytest.skip(f"there is no {name}")
    return json.loads((pictures.RESULTS / name).read_text())


def measured(tuned, model, rows):
    (row,) = (
        row for row in tuned["rows"] if (row["model"], row["rows"], row["out_dtype"]) == (model, rows, "bfloat16")
    )
    return row


def test_times_over_rows():
    tuned = result("tuned.json")
    heads = pictures.rows_data(tuned)
    assert [head["model"] for head in heads] == list(pictures.FOUR)
    for head in heads:
        assert head["rows"] == list(range(1, 33))
        for at, count in enumerate(head["rows"]):
            row = measured(tuned, head["model"], count)
            assert [head[key][at] for key in ("us", "linear_us", "limit_us")] == [
                row[key] for key in ("us", "linear_us", "limit_us")
            ]
            assert (head["vocab"], head["hidden"]) == (row["vocab"], row["hidden"])
            assert head["kernel"][at] == (row["backend"] != "default GEMM")


def test_speedups():
    tuned = result("tuned.json")
    heads = pictures.speedup_data(tuned)
    listed = json.loads((ROOT / "benchmarks" / "heads.json").read_text())
    assert sorted(head["model"] for head in heads) == sorted(head["model"] for head in listed)
    for head in heads:
        first, second = (measured(tuned, head["model"], count) for count in (1, 16))
        assert head["speedup"] == [row["linear_us"] / row["us"] for row in (first, second)]
        assert head["kernel"] == [row["backend"] != "default GEMM" for row in (first, second)]
        assert head["odd"] == (first["vocab"] % 16 != 0)
    order = [(head["odd"], max(head["speedup"])) for head in heads]
    assert order == sorted(order, reverse=True)


def test_host_times():
    host = result("host.json")
    data = pictures.host_data(host)
    assert [name for name, _ in data] == list(pictures.CALLS)
    assert all(microseconds == host["host_us"][name] for name, microseconds in data)


def test_tails():
    us = {"F.linear": 3.0, "ours": 2.0}
    row = {
        "model": "a head",
        "batch": 1,
        "mode": "eager",
        "us": us,
        "ratio": 0.6667,
        "not_measured": {"mm_bf16": "why"},
    }
    assert pictures.tail_data({"rows": [row, {**row, "batch": 8, "mode": "graph"}]}) == [
        {"case": "a head, 1 row", "mode": "eager", "us": us, "ratio": 0.6667},
        {"case": "a head, 8 rows", "mode": "graph", "us": us, "ratio": 0.6667},
    ]


def test_every_way_of_a_tail_is_drawn():
    for step in pictures.tail_data(result("decode_tail.json")):
        assert step["us"].keys() <= pictures.WAYS.keys()


def named():
    """The pictures that the pages show, without their ending."""
    for page in PAGES:
        for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            yield (page.parent / link).resolve().with_suffix("")


def test_every_picture_that_a_page_shows_is_there_in_both_formats():
    assert set(named()) >= {pictures.PICTURES / name for name in ("rows", "speedup", "host")}
    missing = [
        f"{path.name}{end}" for path in named() for end in (".png", ".svg") if not path.with_suffix(end).is_file()
    ]
    assert not missing


def test_every_picture_is_shown():
    assert {path.with_suffix("") for path in pictures.PICTURES.iterdir()} == set(named())


@pytest.mark.parametrize("name", pictures.ALL)
def test_the_pictures_are_drawn_from_these_results(name):
    """``make pictures`` draws them."""
    source, data, _ = pictures.ALL[name]
    said = pictures.digest(data(result(source))).encode()
    for end in (".png", ".svg"):
        assert said in (pictures.PICTURES / f"{name}{end}").read_bytes()


def test_drawing_again_gives_the_same_bytes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = pictures.host_data(result("host.json"))
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    pictures.save(pictures.draw_host(drawn), "first", drawn)
    pictures.save(pictures.draw_host(drawn), "second", drawn)
    for end in (".png", ".svg"):
        assert (tmp_path / f"first{end}").read_bytes() == (tmp_path / f"second{end}").read_bytes()
