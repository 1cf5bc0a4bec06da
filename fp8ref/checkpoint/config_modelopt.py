"""The configs of NVIDIA ModelOpt (inline or in hf_quant_config.json) and of AMD Quark."""

from __future__ import annotations

from typing import Any

from fp8ref.checkpoint.findings import Broken
from fp8ref.checkpoint.scheme import Activation, Declared, LayerScheme, Rule, WeightScale, check_patterns, one_of

ALGORITHMS: dict[str, tuple[WeightScale, Activation]] = {
    "FP8": ("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "token"),
    "FP8_PB_WO": ("block", "none"),
}
"""ModelOpt's quant_algo, in capitals: weight scales and activations."""


def parse_modelopt(section: dict[str, Any], file: str) -> Declared:
    """``quant_method: modelopt``, or the ``quantization`` of hf_quant_config.json.

    Raises:
        Broken: a quant_algo that is not FP8.
    """
    layers = section.get("quantized_layers")
    if _algorithm(section) == "MIXED_PRECISION" and isinstance(layers, dict):
        check_patterns(list(layers), file, "quantized_layers")
        rules = tuple(
            Rule((name,), _modelopt_scheme(entry if isinstance(entry, dict) else {}, file, f"quantized_layers.{name}."))
            for name, entry in layers.items()
        )
    else:
        rules = (Rule(("Linear",), _modelopt_scheme(section, file, "")),)
    keys = [key for key in ("ignore", "exclude_modules") if section.get(key) is not None]
    patterns = [check_patterns(section[key], file, key) for key in keys]
    cache = section.get("kv_cache_quant_algo") or section.get("kv_cache_scheme")
    return Declared(
        "ModelOpt",
        file,
        rules,
        tuple(pattern for group in patterns for pattern in group),
        " and ".join(keys) or "exclude_modules",
        bool(keys),
        "modules",
        None if cache is None else f"KV cache {cache!r}",
    )


def _algorithm(section: dict[str, Any]) -> str:
    """The quant_algo in capitals; ModelOpt itself writes one of them small."""
    return str(section.get("quant_algo")).upper()


def _modelopt_scheme(section: dict[str, Any], file: str, where: str) -> LayerScheme:
    """What a quant_algo means."""
    name = _algorithm(section)
    if name not in ALGORITHMS:
        raise Broken.at(file, f"{where}quant_algo: got {section.get('quant_algo')!r}; {', '.join(ALGORITHMS)} are read")
    weight, activation = ALGORITHMS[name]
    return LayerScheme((weight,), activation, f"{where}quant_algo {name!r}")


_QSCHEMES: dict[str, WeightScale] = {"per_tensor": "tensor", "per_channel": "channel", "per_block": "block"}


def parse_quark(section: dict[str, Any], file: str) -> Declared:
    """``quant_method: quark``.

    Raises:
        Broken: a dtype that is not fp8_e4m3, a scheme that is not read, quantised outputs outside the KV cache.
    """
    everywhere = section.get("global_quant_config")
    if not isinstance(everywhere, dict):
        raise Broken.at(
            file, f"global_quant_config: got {everywhere!r}; an object with weight and input_tensors belongs"
        )
    for key in ("layer_type_quant_config", "algo_config", "softmax_quant_spec"):
        if section.get(key):
            raise Broken.at(file, f"{key}: got {section[key]!r}; it is not read")
    export = section.get("export") if isinstance(section.get("export"), dict) else {}
    one_of(export or {}, "weight_format", (None, "real_quantized"), file)
    cache = check_patterns((export or {}).get("kv_cache_group"), file, "export.kv_cache_group")
    rules = [Rule(("Linear",), _quark_scheme(everywhere, "global_quant_config", file))]
    given = section.get("layer_quant_config") or {}
    if not isinstance(given, dict):
        raise Broken.at(file, f"layer_quant_config: got {given!r}; an object of patterns and schemes belongs")
    check_patterns(list(given), file, "layer_quant_config")
    for pattern, entry in given.items():
        where = f"layer_quant_config[{pattern!r}]"
        if not isinstance(entry, dict):
            raise Broken.at(file, f"{where}: got {entry!r}; an object with weight and input_tensors belongs")
        if entry.get("output_tensors") and pattern not in cache:
            raise Broken.at(file, f"{where}.output_tensors: got a scheme; only those of the KV cache are known")
        rules.append(Rule((pattern,), _quark_scheme(entry, where, file)))
    return Declared(
        "Quark",
        file,
        tuple(rules),
        check_patterns(section.get("exclude"), file, "exclude"),
        "exclude",
        True,
        "modules",
        f"kv_cache_group {list(cache)}" if cache else None,
    )


def _quark_scheme(section: dict[str, Any], where: str, file: str) -> LayerScheme:
    """The scheme of one entry."""
    if section.get("bias"):
        raise Broken.at(file, f"{where}.bias: got a scheme; biases are read as floats only")
    weight = _quark_spec(section.get("weight"), f"{where}.weight", file)
    if weight is None:
        raise Broken.at(file, f"{where}.weight: got nothing; a scheme with dtype fp8_e4m3 belongs")
    name = str(weight.get("qscheme"))
    if name not in _QSCHEMES:
        raise Broken.at(file, f"{where}.weight.qscheme: got {weight.get('qscheme')!r}; {', '.join(_QSCHEMES)} are read")
    if weight.get("is_dynamic"):
        raise Broken.at(file, f"{where}.weight.is_dynamic: got True; weights have static scales")
    size = weight.get("block_size", [128, 128])
    if name == "per_block" and size != [128, 128]:
        raise Broken.at(file, f"{where}.weight.block_size: got {size!r}; [128, 128] is read")
    activation = _quark_activation(section.get("input_tensors"), f"{where}.input_tensors", file)
    return LayerScheme((_QSCHEMES[name],), activation, f"{where}: weight {name!r}, input_tensors {activation!r}")


def _quark_activation(value: object, where: str, file: str) -> Activation:
    """How activations are scaled."""
    spec = _quark_spec(value, where, file)
    if spec is None:
        return "none"
    kinds: dict[tuple[bool, str], Activation] = {
        (False, "per_tensor"): "static",
        (True, "per_tensor"): "tensor",
        (True, "per_channel"): "token",
        (True, "per_token"): "token",
        (True, "per_group"): "group",
    }
    kind = kinds.get((bool(spec.get("is_dynamic")), str(spec.get("qscheme"))))
    if kind is None or (kind == "group" and spec.get("group_size") != 128):
        got = {key: spec.get(key) for key in ("is_dynamic", "qscheme", "group_size")}
        raise Broken.at(
            file, f"{where}: got {got}; static per_tensor, dynamic per tensor, token or group of 128 is read"
        )
    return kind


def _quark_spec(value: object, where: str, file: str) -> dict[str, Any] | None:
    """A tensor's specification, which must be FP8; a list of one is that one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("dtype") != "fp8_e4m3":
        dtype = value.get("dtype") if isinstance(value, dict) else value
        raise Broken.at(file, f"{where}.dtype: got {dtype!r}; 'fp8_e4m3' is read")
    return value
