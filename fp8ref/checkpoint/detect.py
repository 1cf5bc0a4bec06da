"""Which of the six formats a checkpoint is, by its config and by the tensors that are there."""

from __future__ import annotations

from typing import Any

from fp8ref.checkpoint.config_compressed import parse_compressed
from fp8ref.checkpoint.config_fp8 import parse_fbgemm, parse_fp8
from fp8ref.checkpoint.config_modelopt import parse_modelopt, parse_quark
from fp8ref.checkpoint.files import CheckpointFiles
from fp8ref.checkpoint.findings import Broken
from fp8ref.checkpoint.scheme import Declared

READ = ("compressed-tensors", "fp8 (AutoFP8, DeepSeek blocks, FineGrainedFP8)", "fbgemm_fp8", "modelopt", "quark")

_OTHERS = {
    "aqlm": "AQLM's codebooks",
    "auto-round": "AutoRound's integers",
    "awq": "AWQ's int4",
    "bitnet": "BitNet's ternary weights",
    "bitsandbytes": "bitsandbytes' int8, fp4 and nf4",
    "eetq": "EETQ's int8",
    "fp_quant": "FP-Quant's fp4",
    "gptq": "GPTQ's integers",
    "higgs": "HIGGS' codebooks",
    "hqq": "HQQ's integers",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8, with scales of 32 elements",
    "modelopt_fp4": "NVFP4",
    "nvfp4": "NVFP4",
    "petit_nvfp4": "NVFP4",
    "quanto": "Quanto's integers",
    "torchao": "torchao's pickled tensors",
}


def detect(files: CheckpointFiles) -> Declared:
    """Read the quantisation config, whichever format it has.

    Raises:
        Broken: there is none, or one that is not read; the message names it.
    """
    section, file = _section(files)
    method = section.get("quant_method", _guess(section))
    if method == "compressed-tensors":
        return parse_compressed(section, file)
    if method == "fp8":
        inverse = [info for name, info in files.tensors.items() if name.endswith(".weight_scale_inv")]
        return parse_fp8(section, file, inverse=bool(inverse), grid=any(len(info.shape) > 1 for info in inverse))
    if method == "fbgemm_fp8":
        return parse_fbgemm(section, file)
    if method == "modelopt":
        return parse_modelopt(section, file)
    if method == "quark":
        return parse_quark(section, file)
    kind = f": {_OTHERS[method]}" if isinstance(method, str) and method in _OTHERS else ""
    raise Broken.at(file, f"quant_method: got {method!r}{kind}; read are {', '.join(READ)}")


def _section(files: CheckpointFiles) -> tuple[dict[str, Any], str]:
    """The quantisation config and the file that it is in."""
    text = files.config.get("text_config")
    places = {
        "quantization_config": files.config.get("quantization_config"),
        "compression_config": files.config.get("compression_config"),
        "text_config.quantization_config": text.get("quantization_config") if isinstance(text, dict) else None,
    }
    found = {key: value for key, value in places.items() if value is not None}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise Broken.at("config.json", f"{key}: got {value!r}; an object belongs")
    sections = list(found.values())
    if any(section != sections[0] for section in sections):
        raise Broken.at("config.json", f"{' and '.join(found)} disagree; one of them is wrong")
    beside = _beside(files)
    if not sections:
        if beside is None:
            raise Broken.at("config.json", _nothing(files))
        return beside, "hf_quant_config.json"
    inline = sections[0]
    if beside is not None:
        _compare(inline, beside)
    if isinstance(inline.get("quantization"), dict):
        inline = {**inline["quantization"], "quant_method": inline.get("quant_method", "modelopt")}
    return inline, "config.json"


def _beside(files: CheckpointFiles) -> dict[str, Any] | None:
    """ModelOpt's own file."""
    if not files.quantization:
        return None
    section = files.quantization.get("quantization")
    if not isinstance(section, dict):
        raise Broken.at("hf_quant_config.json", f"quantization: got {section!r}; an object with quant_algo belongs")
    return {**section, "quant_method": "modelopt"}


def _compare(inline: dict[str, Any], beside: dict[str, Any]) -> None:
    """Refuse two configs that contradict each other."""
    inner = inline.get("quantization")
    here = inline.get("quant_algo", inner.get("quant_algo") if isinstance(inner, dict) else None)
    there = beside.get("quant_algo")
    if str(here).upper() != str(there).upper():
        raise Broken.at(
            "hf_quant_config.json", f"quant_algo: got {there!r}, but quantization_config in config.json says {here!r}"
        )


def _nothing(files: CheckpointFiles) -> str:
    """Say that there is no quantisation config, and what the tensors look like."""
    quantised = [name for name, info in files.tensors.items() if info.dtype == "F8_E4M3"]
    if quantised:
        return (
            f"has no quantization_config, but {quantised[0]} and {len(quantised) - 1} more are F8_E4M3; "
            "how activations are scaled is written nowhere"
        )
    return "has no quantization_config: this is no FP8 checkpoint (fp8ref.convert_checkpoint makes one)"


def _guess(section: dict[str, Any]) -> str | None:
    """The format by its own keys, where quant_method is missing."""
    keys = {
        "config_groups": "compressed-tensors",
        "global_quant_config": "quark",
        "quant_algo": "modelopt",
        "quantization": "modelopt",
    }
    return next((method for key, method in keys.items() if key in section), None)
