"""What users of other libraries hit, by project and issue number (silently wrong, or refused without need)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8ref
from checkpoint_corruption import reconfigure, refused, rewrite
from checkpoint_formats import put_oracle, small_model, spread, write, write_small
from checkpoint_variants import VARIANTS

X = torch.linspace(-2, 2, 3 * 48).reshape(3, 48)


def loaded(folder: Path, **options: Any) -> Any:
    return fp8ref.load_checkpoint(folder, small_model(7), backend="emulate", **options)


@pytest.mark.parametrize("variant", ["DeepSeek blocks", "compressed-tensors block"])
def test_block_tails_vllm_40016_48588_52997(variant: str, tmp_path: Path) -> None:
    """N = 136 and K = 136 leave tails of 8: the scales are ceil-sized, and the tail has its own."""
    written = write_small(tmp_path, variant)
    model = loaded(tmp_path)
    assert list(written.scales["block.up"].shape) == [2, 1]
    assert list(written.scales["block.down"].shape) == [1, 2]
    assert torch.equal(model.block.up.dequantized_weight(), written.weights["block.up"])
    assert torch.equal(model(X), put_oracle(small_model(), written)(X))


def test_floor_sized_block_scales_are_refused(tmp_path: Path) -> None:
    write_small(tmp_path, "DeepSeek blocks")
    rewrite(tmp_path, block__up__weight_scale_inv=torch.ones(1, 1))
    refused(tmp_path, small_model(), "block.up.weight_scale_inv", "[2, 1] belongs")


@pytest.mark.parametrize("shape", [(0, 48), (136, 0)])
def test_a_weight_without_values_is_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    write_small(tmp_path, "DeepSeek blocks")
    rewrite(tmp_path, block__up__weight=torch.empty(shape).to(torch.float8_e4m3fn))
    refused(tmp_path, small_model(), "block.up.weight", "a weight without values")


def test_weight_scale_inv_is_the_multiplier_despite_its_name(tmp_path: Path) -> None:
    written = write_small(tmp_path, "DeepSeek blocks")
    stored = written.tensors["block.up.weight_scale_inv"]
    codes = written.codes["block.up"].float()
    weight = loaded(tmp_path).block.up.dequantized_weight()
    assert torch.equal(weight, codes * spread(stored, "block", 136, 48))
    assert not torch.equal(weight, codes / spread(stored, "block", 136, 48))


@pytest.mark.parametrize("shape", [[], [1], [1, 1], [136], [136, 1]])
def test_scalar_and_channel_scales_are_accepted_tgi_2388(shape: list[int], tmp_path: Path) -> None:
    write_small(tmp_path, "AutoFP8 dynamic")
    scale = torch.full(shape, 0.125)
    rewrite(tmp_path, block__up__weight_scale=scale)
    layer = loaded(tmp_path).block.up
    assert torch.equal(layer.dequantized_weight(), layer.weight.float() * 0.125)
    assert layer.recipe.weight_scaling == ("tensor" if scale.numel() == 1 else "row")


@pytest.mark.parametrize("shape", [[2], [3], [2, 1], [48], [48, 1], [1, 136], [136, 48]])
def test_only_the_first_of_several_scales_used_vllm_20076(shape: list[int], tmp_path: Path) -> None:
    """An unexpected number of scales is refused, and so are those of the wrong axis."""
    write_small(tmp_path, "AutoFP8 dynamic")
    rewrite(tmp_path, block__up__weight_scale=torch.full(shape, 0.125))
    refused(tmp_path, small_model(), "block.up.weight_scale", "belongs")


def test_a_1d_scale_that_fits_only_the_other_axis_is_refused_pytorch_130059(tmp_path: Path) -> None:
    write_small(tmp_path, "FBGEMM")
    rewrite(tmp_path, block__down__weight_scale=torch.full([136], 0.125))  # K values for N = 48 rows
    refused(tmp_path, small_model(), "block.down.weight_scale", "[48, 1] belongs")


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf"), -3.4028234663852886e38])
@pytest.mark.parametrize("tensor", ["block__up__weight_scale", "block__down__input_scale"])
def test_sentinels_and_uninitialised_scales_vllm_omni_5263_vllm_39764(
    tensor: str, value: float, tmp_path: Path
) -> None:
    write_small(tmp_path, "AutoFP8 static")
    rewrite(tmp_path, **{tensor: torch.tensor(value)})
    refused(tmp_path, small_model(), tensor.replace("__", "."), f"has {value}", "finite and above 0")


def test_a_scale_of_1e_minus_23_flashinfer_2595_vllm_34914(tmp_path: Path) -> None:
    """Tiny is no error, and gives no NaN."""
    write_small(tmp_path, "AutoFP8 static")
    rewrite(tmp_path, block__up__weight_scale=torch.tensor(1e-23), block__up__input_scale=torch.tensor(1e-23))
    model = loaded(tmp_path)
    assert torch.equal(model.block.up.dequantized_weight(), model.block.up.weight.float() * torch.tensor(1e-23))
    assert bool(model(X).isfinite().all())


def test_odd_sizes_are_fp8_too_ao_571_ao_1268(tmp_path: Path) -> None:
    """Neither refused for K % 16 nor left out in silence."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(37, 11)

    model = Odd()
    written = write(tmp_path, VARIANTS["FBGEMM"], model.state_dict(), ["layer"], {})
    fp8ref.load_checkpoint(tmp_path, model, backend="emulate")
    assert isinstance(model.layer, fp8ref.Fp8Linear)
    assert torch.equal(model.layer.dequantized_weight(), written.weights["layer"])


@pytest.mark.parametrize("variant", ["compressed-tensors channel", "AutoFP8 dynamic", "Quark per channel"])
def test_a_layer_silently_left_in_16_bits_ao_1268(variant: str, tmp_path: Path) -> None:
    """The config says FP8, the tensor does not: an error that names both."""
    written = write_small(tmp_path, variant)
    rewrite(tmp_path, block__up__weight=written.weights["block.up"].bfloat16(), block__up__weight_scale=None)
    refused(tmp_path, small_model(), "block.up.weight", "is BF16 [136, 48]", "config.json", "does not leave it out")


@pytest.mark.parametrize("pattern", ["block.up", "re:.*up$"])
def test_a_layer_that_the_config_leaves_out_and_that_is_fp8(pattern: str, tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    reconfigure(tmp_path, ignore=["lm_head", pattern])
    refused(tmp_path, small_model(), "block.up.weight", "is F8_E4M3", f"leaves it out by {pattern!r}")


def test_a_layer_that_no_group_targets(tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    groups = json.loads(json.dumps(VARIANTS["compressed-tensors channel"].config["config_groups"]))
    groups["group_0"]["targets"] = ["re:.*down"]
    reconfigure(tmp_path, config_groups=groups)
    refused(tmp_path, small_model(), "block.up.weight", "no group in config.json targets 'block.up'")


@pytest.mark.parametrize(
    ("general", "exact"), [("Linear", "re:block[.]do.*"), ("Linear", "block.down"), ("re:.*", "block.down")]
)
def test_each_layer_follows_its_own_group(general: str, exact: str, tmp_path: Path) -> None:
    """The more exact pattern decides, whatever the order."""
    written = write_small(tmp_path, "compressed-tensors channel")
    groups = json.loads(json.dumps(VARIANTS["compressed-tensors channel"].config["config_groups"]))
    static = json.loads(json.dumps(VARIANTS["compressed-tensors static"].config["config_groups"]))["group_0"]
    groups["group_0"]["targets"] = [general]
    static["targets"] = [exact]
    static["weights"]["strategy"] = "channel"
    reconfigure(tmp_path, config_groups={**groups, "group_1": static})
    rewrite(tmp_path, block__down__input_scale=torch.tensor([0.25]))
    model = loaded(tmp_path)
    assert model.block.up.recipe == fp8ref.Recipe("row", "row")
    assert model.block.down.recipe == fp8ref.Recipe("row", "tensor", dynamic=False)
    assert torch.equal(model.block.down.dequantized_weight(), written.weights["block.down"])


def test_a_static_checkpoint_never_runs_dynamic(tmp_path: Path) -> None:
    written = write_small(tmp_path, "AutoFP8 static")
    model = loaded(tmp_path)
    assert not model.block.up.recipe.dynamic
    assert model.block.up.input_scale == written.inputs["block.up"]
    assert torch.equal(model(X), put_oracle(small_model(), written)(X))
    rewrite(tmp_path, block__up__input_scale=None)
    refused(tmp_path, small_model(), "block.up.weight", "block.up.input_scale is missing")


def test_a_dynamic_checkpoint_with_input_scales_is_a_contradiction(tmp_path: Path) -> None:
    write_small(tmp_path, "AutoFP8 dynamic")
    rewrite(tmp_path, block__up__input_scale=torch.tensor(0.5))
    refused(tmp_path, small_model(), "block.up.input_scale", "activation_scheme 'dynamic'", "config.json")


def test_a_token_does_not_depend_on_its_batch_mates_vllm_57016(tmp_path: Path) -> None:
    write_small(tmp_path, "AutoFP8 dynamic")
    layer = loaded(tmp_path).block.up
    assert torch.equal(layer(X)[:1], layer(X[:1]))


def test_no_silent_fallback_colossalai_6393(tmp_path: Path) -> None:
    write_small(tmp_path, "AutoFP8 dynamic")
    model = fp8ref.load_checkpoint(tmp_path, small_model(7))  # backend="auto": the kernels
    with pytest.raises(ValueError, match=r"emulate"):
        model(X)


def test_the_bound_of_fbgemm_is_applied(tmp_path: Path) -> None:
    written = write_small(tmp_path, "FBGEMM")
    model = loaded(tmp_path)
    assert torch.equal(model(X), put_oracle(small_model(), written)(X))
    reconfigure(tmp_path, activation_scale_ub=1200.0)
    assert not torch.equal(loaded(tmp_path)(X), model(X))
    rewrite(tmp_path, block__up__input_scale_ub=torch.tensor([7.0]))
    refused(tmp_path, small_model(), "block.up.input_scale_ub", "is 7.0")
    reconfigure(tmp_path, activation_scale_ub=None)
    refused(tmp_path, small_model(), "activation_scale_ub: got None")


def test_bf16_scales_convert_exactly(tmp_path: Path) -> None:
    written = write_small(tmp_path, "compressed-tensors channel bf16")
    stored = written.tensors["block.up.weight_scale"]
    assert stored.dtype == torch.bfloat16
    kept = loaded(tmp_path).block.up.weight_scale
    assert kept.dtype == torch.float32
    assert torch.equal(kept.bfloat16(), stored)
    assert torch.equal(kept, stored.float())


def test_ue8m0_scales_are_powers_of_two(tmp_path: Path) -> None:
    write_small(tmp_path, "DeepSeek blocks ue8m0")
    assert loaded(tmp_path).block.up.recipe.scale_format == "ue8m0"
    rewrite(tmp_path, block__up__weight_scale_inv=torch.full([2, 1], 0.75))
    refused(tmp_path, small_model(), "block.up.weight_scale_inv", "no powers of two", "ue8m0")


def test_the_nan_of_e8m0_is_no_scale(tmp_path: Path) -> None:
    write_small(tmp_path, "DeepSeek blocks e8m0")
    scale = torch.tensor([[127], [0xFF]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    rewrite(tmp_path, block__up__weight_scale_inv=scale)
    refused(tmp_path, small_model(), "block.up.weight_scale_inv", "has nan at [1, 0]")


def test_fp8_is_two_formats_and_the_tensors_decide(tmp_path: Path) -> None:
    written = write_small(tmp_path / "silent", "DeepSeek blocks")
    reconfigure(tmp_path / "silent", weight_block_size=None)
    model = loaded(tmp_path / "silent")
    assert torch.equal(model.block.up.dequantized_weight(), written.weights["block.up"])
    write_small(tmp_path / "wrong", "AutoFP8 dynamic")
    reconfigure(tmp_path / "wrong", weight_block_size=[128, 128])
    refused(tmp_path / "wrong", small_model(), "block.up.weight_scale", "weight_block_size [128, 128]")


def test_a_config_and_a_file_beside_it_that_disagree(tmp_path: Path) -> None:
    write_small(tmp_path, "ModelOpt per channel")
    other = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    refused(tmp_path, small_model(), "hf_quant_config.json", "quant_algo: got 'FP8'", "FP8_PER_CHANNEL_PER_TOKEN")


CACHE = {
    "block__k_scale": torch.tensor(0.5),
    "block__up__v_scale": torch.tensor(0.5),
    "block__kv_scale": torch.tensor(0.5),
    "block__k_proj__output_scale": torch.tensor(0.5),
}


@pytest.mark.parametrize("name", CACHE)
def test_scales_of_the_kv_cache_are_reported_not_dropped_in_silence(name: str, tmp_path: Path) -> None:
    write_small(tmp_path, "AutoFP8 dynamic")
    rewrite(tmp_path, **{name: CACHE[name]})
    tensor = name.replace("__", ".")
    with pytest.warns(fp8ref.CheckpointWarning, match=re.escape(tensor) + ".* not used"):
        loaded(tmp_path)
    found = fp8ref.inspect_checkpoint(tmp_path, progress=False)
    assert found.ok
    assert list(found.contents.unused) == [tensor]
    assert [finding.tensor for finding in found.findings if finding.level == "warning"] == [tensor]


def test_weights_without_quantised_activations_warn(tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors weight-only")
    with pytest.warns(fp8ref.CheckpointWarning, match="leaves the activations of 2 layers unquantised"):
        loaded(tmp_path)


def test_block_weights_with_token_activations_are_refused(tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors block")
    groups = json.loads(json.dumps(VARIANTS["compressed-tensors block"].config["config_groups"]))
    groups["group_0"]["input_activations"].update(strategy="token", group_size=None)
    reconfigure(tmp_path, config_groups=groups)
    refused(tmp_path, small_model(), "block.up.weight", "block weights go with dynamic groups of 128")
