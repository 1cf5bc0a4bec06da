"""Plans: splits that cuBLASLt's rule describes, the tuning files, and that only data decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.emulation.accumulate import split_parts
from fp8ref.kernels import plan
from fp8ref.kernels.plan import BUCKETS, Plan, Tile, bucket_of, choose, library_can, parts_of, rule_split

ANY_GPU = "a GPU without a tuning file"
FILES = sorted((Path(plan.__file__).parent / "tuning").glob("*.json"))
sizes = st.integers(1, 30000)


@given(k=st.integers(1, 100_000), split_k=st.integers(1, 1000), multiple=st.sampled_from([1, 4]))
def test_parts_are_those_of_the_oracle(k: int, split_k: int, multiple: int) -> None:
    part_tiles, parts = parts_of(k, split_k, multiple)
    spans = split_parts(k, split_k, multiple)
    assert [start for start, _ in spans] == [part_tiles * 128 * i for i in range(parts)]
    assert split_parts(k, parts, multiple) == spans, "the number that explain() gives must describe the same parts"
    assert parts_of(0, split_k, multiple) == (1, 1)


@given(n=sizes, k=sizes, m=st.integers(1, 5000))
def test_any_shape_has_a_plan_that_fits(n: int, k: int, m: int) -> None:
    for name in (ANY_GPU, "NVIDIA H200"):
        chosen = choose(name, n, k, m)
        part_tiles, parts = parts_of(k, chosen.split_k)
        assert parts == chosen.split_k
        assert parts == 1 or part_tiles * 128 % chosen.tile.block_k == 0
        assert chosen.path == "triton" or library_can(n, k, m)
        assert choose(name, n, k, m, library_allowed=False).path == "triton"
        assert chosen.why


@given(n=sizes, k=sizes, m=st.integers(1, 5000))
def test_batch_invariant_never_splits(n: int, k: int, m: int) -> None:
    for name in (ANY_GPU, "NVIDIA H200"):
        assert choose(name, n, k, m, batch_invariant=True).split_k == 1


@given(n=sizes, k=sizes, m=st.integers(1, 64))
def test_the_rule_fills_one_wave_and_keeps_parts_long(n: int, k: int, m: int) -> None:
    split = rule_split(n, k, m)
    assert split == 1 or split * -(-n // 64) <= 128
    assert split == 1 or parts_of(k, split)[0] >= 4


def test_the_library_stays_where_cublaslt_was_seen_not_to_split() -> None:
    for n in (16, 64, 256, 4096):
        for k in (128, 4096, 5232, 16384):
            for m in (65, 128, 4096):
                assert not library_can(n, k, m) or k < 5232 or m * n > 131_000


def test_a_part_that_is_no_whole_number_of_steps_gets_shorter_steps() -> None:
    odd = Plan("triton", 3, Tile(block_k=256))
    assert plan._fit(odd, 128 * 9).tile.block_k == 128
    assert plan._fit(odd, 128 * 12).tile.block_k == 256


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tuning_files(file: Path) -> None:
    table = json.loads(file.read_text())
    assert table["entries"]
    for row in table["entries"]:
        n, k, m = row["n"], row["k"], row["m"]
        assert bucket_of(m) == m, row
        chosen = choose(table["device"], n, k, m)
        assert (chosen.path, chosen.split_k) == (row["path"], row["split_k"]), row
        assert chosen.why.startswith("tuned on"), row
        if row["path"] == "triton":
            tile = Tile(**row["tile"])
            assert chosen.tile == tile, row
            assert tile.block_n % 64 == 0, f"{row}: no wgmma"
            assert tile.block_m >= 16, row
            # Shared memory of one program: 227 KB on Hopper.
            assert tile.stages * tile.block_k * (tile.block_m + tile.block_n) <= 227 * 1024, row


def test_there_is_a_tuning_file_for_the_h200() -> None:
    assert "nvidia_h200.json" in [file.name for file in FILES]


ROW = {"n": 640, "k": 512, "m": 16, "us": 1.0, "path": "triton", "split_k": 4}


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path that FP8REF_TUNING names; nothing that was read before or is read here stays known."""
    file = tmp_path / "mine.json"
    monkeypatch.setenv("FP8REF_TUNING", str(file))
    for known in (plan._shipped, choose):
        known.cache_clear()
    yield file
    for known in (plan._shipped, choose):
        known.cache_clear()


def test_a_tuning_file_of_the_users_own(own_file: Path) -> None:
    own_file.write_text(json.dumps({"device": ANY_GPU, "entries": [ROW]}))
    assert choose(ANY_GPU, 640, 512, 9).split_k == 4
    assert choose(ANY_GPU, 640, 512, 17).split_k == 1
    assert choose("another", 640, 512, 9).split_k == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "FileNotFoundError"),
        ("", "JSONDecodeError"),
        ('{"device": "a GPU"', "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ({"entries": [ROW]}, "KeyError: 'device'"),
        ([{**ROW, "m": 17}], "m is one of"),
        ([{**ROW, "split_k": 0}], "ints above zero"),
        ([{**ROW, "n": "640"}], "ints above zero"),
        ([{**ROW, "path": "cutlass"}], 'path is "triton", or "library"'),
        ([{**ROW, "path": "library"}], "library.*split_k of 1"),
        ([{**ROW, "tile": {"block_n": 32}}], "at least 16 x 64 x 128"),
        ([{**ROW, "tile": {"block_k": 192}}], "powers of two"),
        ([{**ROW, "tile": {"block": 64}}], "TypeError.*'block'"),
    ],
)
def test_a_tuning_file_that_is_none_is_an_error_that_names_it(own_file: Path, text: Any, words: str) -> None:
    if isinstance(text, list):
        text = {"device": ANY_GPU, "entries": text}
    if text is not None:
        own_file.write_text(text if isinstance(text, str) else json.dumps(text))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"FP8REF_TUNING: got .*mine.json, no tuning file.*{words}"):
            choose(ANY_GPU, 640, 512, 9)


def test_buckets_cover_every_batch() -> None:
    assert [bucket_of(m) for m in (1, 16, 17, 32, 33, 256, 257, 100_000)] == [16, 16, 32, 32, 64, 256, 4096, 4096]
    assert list(BUCKETS) == sorted(BUCKETS)
