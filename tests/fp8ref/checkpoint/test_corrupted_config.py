"""Configs with something odd in some place: a finding or a sound checkpoint, never another exception."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8ref
from checkpoint_formats import small_model, snapshot, write_small
from checkpoint_variants import VARIANTS

ODD: list[Any] = [
    None, 0, 5, -1, 1.5, float("inf"), 10**400, True, False, "", "x", "*", "re:(", [], [1], ["x"], ["re:("], [[]],
    [None], {}, {"a": 1}, {"re:(": {}}, 1e-40, ["re:a{99999999999}"], {"re:a{99999999999}": {}},
    ["re:" + 2000 * "(" + 2000 * ")"],
]  # fmt: skip
Place = tuple[Any, ...]


def places(value: object, path: Place = ()) -> Iterator[Place]:
    """The way to each value inside a JSON value."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def replaced(value: Any, path: Place, new: object) -> Any:
    """A copy with another value in one place."""
    if not path:
        return new
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("configs")
    return {name: write_small(folder / str(number), name).folder for number, name in enumerate(VARIANTS)}


@given(st.data())
def test_an_odd_value_in_some_place(folders: dict[str, Path], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(VARIANTS)))
    beside = VARIANTS[name].place == "hf_quant_config.json"
    file = folders[name] / ("hf_quant_config.json" if beside else "config.json")
    text = file.read_text()
    config = json.loads(text)
    path = data.draw(st.sampled_from(list(places(config))))
    model = small_model()
    before = snapshot(model)
    try:
        file.write_text(json.dumps(replaced(config, path, data.draw(st.sampled_from(ODD)))))
        ok = fp8ref.inspect_checkpoint(folders[name], progress=False).ok
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fp8ref.CheckpointWarning)
            fp8ref.load_checkpoint(folders[name], model, backend="emulate")
    except fp8ref.CheckpointError as error:
        assert snapshot(model) == before
        assert error.findings  # noqa: PT017 - a sound checkpoint is allowed too
    else:
        assert ok
    finally:
        file.write_text(text)


@pytest.mark.parametrize("odd", ["text", 5, [], True])
def test_two_configs_of_modelopt_of_which_one_is_odd(odd: object, tmp_path: Path) -> None:
    write_small(tmp_path, "ModelOpt")
    section = {"quant_method": "modelopt", "quantization": odd}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    with pytest.raises(fp8ref.CheckpointError, match=r"hf_quant_config.json: quant_algo: got 'FP8', but"):
        fp8ref.load_checkpoint(tmp_path, small_model(), backend="emulate")


@pytest.mark.parametrize("pattern", ["re:(", "re:a{99999999999}", "re:" + 2000 * "(" + 2000 * ")"])
def test_regular_expressions_that_do_not_compile(pattern: str, tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    config = copy.deepcopy(VARIANTS["compressed-tensors channel"].config)
    config["ignore"].append(pattern)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(fp8ref.CheckpointError, match=r"config.json: ignore: .* is no regular expression"):
        fp8ref.load_checkpoint(tmp_path, small_model(), backend="emulate")


@pytest.mark.parametrize(
    "bound", [None, 0, -1.0, 1e-40, 2.0**-127, 3.5e38, 1e39, float("inf"), float("nan"), True, "1"]
)
def test_bounds_that_are_none(bound: object, tmp_path: Path) -> None:
    write_small(tmp_path, "FBGEMM")
    config = {**VARIANTS["FBGEMM"].config, "activation_scale_ub": bound}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert not fp8ref.inspect_checkpoint(tmp_path, scan=False).ok
    with pytest.raises(fp8ref.CheckpointError, match=r"config.json: activation_scale_ub: got"):
        fp8ref.load_checkpoint(tmp_path, small_model(), backend="emulate")
