"""The config of compressed-tensors (llm-compressor), also under its older key ``compression_config``."""

from __future__ import annotations

from typing import Any

from fp8ref.checkpoint.findings import Broken
from fp8ref.checkpoint.scheme import Activation, Declared, LayerScheme, Rule, WeightScale, check_patterns, one_of

FORMATS = ("float-quantized", "naive-quantized")
_GROUP = 128


def parse_compressed(section: dict[str, Any], file: str) -> Declared:
    """``quant_method: compressed-tensors``.

    Raises:
        Broken: something in it is not read: another format or number of bits, groups, sparsity, transforms.
    """
    one_of(section, "format", (*FORMATS, "mixed-precision", None), file)
    for key, wanted in (("sparsity_config", "sparse weights"), ("transform_config", "transforms such as rotations")):
        if _active(section.get(key)):
            raise Broken.at(file, f"{key}: got {section[key]!r}; {wanted} are not read")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise Broken.at(file, f"config_groups: got {groups!r}; at least one group with targets and weights belongs")
    rules = tuple(_rule(name, group, section.get("format"), file) for name, group in groups.items())
    cache = section.get("kv_cache_scheme")
    return Declared(
        "compressed-tensors",
        file,
        rules,
        check_patterns(section.get("ignore"), file, "ignore"),
        "ignore",
        True,
        "compressed-tensors",
        None if cache is None else f"kv_cache_scheme {_brief(cache)}",
    )


def _active(value: object) -> bool:
    """Whether a sparsity or transform section does anything."""
    if not isinstance(value, dict):
        return value is not None
    if "config_groups" in value:
        return bool(value["config_groups"])
    return bool(value) and value.get("format", "dense") != "dense"


def _rule(name: str, group: object, outer: object, file: str) -> Rule:
    """One group of layers."""
    where = f"config_groups.{name}"
    if not isinstance(group, dict):
        raise Broken.at(file, f"{where}: got {group!r}; an object with targets and weights belongs")
    one_of(group, "format", (*FORMATS, None) if outer != "mixed-precision" else FORMATS, file, why=f" in {where}")
    if group.get("output_activations") is not None:
        raise Broken.at(file, f"{where}.output_activations: got {_brief(group['output_activations'])}; none are read")
    weight, said = _weights(group.get("weights"), f"{where}.weights", file)
    activation = _activations(group.get("input_activations"), f"{where}.input_activations", file)
    targets = check_patterns(group.get("targets"), file, f"{where}.targets")
    if not targets:
        raise Broken.at(file, f"{where}.targets: got {group.get('targets')!r}; at least one pattern of layers belongs")
    return Rule(targets, LayerScheme((weight,), activation, f"{where}: {said}, input_activations {activation!r}"))


def _weights(value: object, where: str, file: str) -> tuple[WeightScale, str]:
    """The kind of weight scales of a group."""
    weights = _float8(value, where, file)
    strategy = weights.get("strategy") or "tensor"
    if strategy not in ("tensor", "channel", "block"):
        raise Broken.at(file, f"{where}.strategy: got {strategy!r}; 'tensor', 'channel' or 'block' is read")
    if weights.get("dynamic"):
        raise Broken.at(file, f"{where}.dynamic: got {weights['dynamic']!r}; weights have static scales")
    structure = weights.get("block_structure")
    if strategy == "block" and structure not in ([_GROUP, _GROUP], "128x128"):
        raise Broken.at(file, f"{where}.block_structure: got {structure!r}; [128, 128] is read")
    kinds: dict[str, WeightScale] = {"tensor": "tensor", "channel": "channel", "block": "block"}
    return kinds[strategy], f"strategy {strategy!r}"


def _activations(value: object, where: str, file: str) -> Activation:
    """How the activations of a group are scaled."""
    if value is None:
        return "none"
    given = _float8(value, where, file)
    dynamic = given.get("dynamic", False)
    strategy = str(given.get("strategy") or ("token" if dynamic is True else "tensor"))
    kinds: dict[tuple[object, str], Activation] = {
        (False, "tensor"): "static",
        (True, "tensor"): "tensor",
        (True, "token"): "token",
        (True, "group"): "group",
    }
    kind = kinds.get((dynamic, strategy)) if isinstance(dynamic, bool) else None
    if kind is None or (kind == "group" and given.get("group_size") != _GROUP):
        raise Broken.at(
            file,
            f"{where}: got {_brief(given)}; static per tensor, or dynamic per tensor, token or group of 128 is read",
        )
    return kind


def _float8(value: object, where: str, file: str) -> dict[str, Any]:
    """Quantisation arguments that mean symmetric FP8."""
    if not isinstance(value, dict):
        raise Broken.at(file, f"{where}: got {value!r}; num_bits, type and strategy belong")
    kind = f"{value.get('type', 'int')}{value.get('num_bits', 8)}"
    if kind != "float8":
        raise Broken.at(file, f"{where}: got {kind}; type 'float' with num_bits 8 is read, not {kind}")
    if value.get("symmetric", True) is not True:
        raise Broken.at(file, f"{where}.symmetric: got {value['symmetric']!r}; FP8 without zero points is read")
    return value


def _brief(value: object) -> str:
    """A section in one line, without its empty entries."""
    if not isinstance(value, dict):
        return repr(value)
    return repr({key: entry for key, entry in value.items() if entry not in (None, {}, [])})
