"""The header of one safetensors file: which tensors it holds and where, checked without reading them.

Format: 8 bytes with the length of a JSON object (little endian), the object, then the bytes of the tensors without gaps
(the format's own description, huggingface/safetensors, README).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from fp8ref.checkpoint.findings import Broken, Finding

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The dtypes that are read; a file with another is refused by name."""

FLOATS = ("F16", "BF16", "F32", "F64")

_MAX_HEADER = 100_000_000
"""The format's own limit, in bytes."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: name, dtype as the file names it, shape, place.

    Attributes:
        name: its key.
        dtype: such as "F8_E4M3".
        shape: its sizes.
        file: the file's name, relative to the folder.
        start: the first byte, counted from the end of the header.
        nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """How many values."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        """Dtype and shape.

        >>> print(TensorInfo("w", "F32", (2, 3), "m.safetensors", 0, 24))
        F32 [2, 3]
        """
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: Path) -> tuple[dict[str, TensorInfo], list[Finding]]:
    """Read and check the header of a file.

    Returns:
        The sound tensors by name, and an error for each unsound one: a dtype that is not read, offsets that do not fit
        dtype and shape, overlap or leave a gap, a name that is there twice.

    Raises:
        Broken: the header itself cannot be read, or the file is shorter or longer than it says.
    """
    name = path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if length < 0 or length > min(size - 8, _MAX_HEADER):
                raise Broken.at(name, _short(size, length))
            text = file.read(length)
    except OSError as error:
        raise Broken.at(name, f"cannot be read: {error.strerror}") from None
    entries = _parse(text, name)
    infos: dict[str, TensorInfo] = {}
    findings: list[Finding] = []
    for key, entry in entries:
        if key == "__metadata__":
            continue
        try:
            if not key.isprintable():
                raise Broken.at(name, f"has a tensor {key!a}; such letters belong in no name")
            if key in infos:
                raise Broken.at(name, "is there twice in the header", key)
            infos[key] = _info(key, entry, name)
        except Broken as broken:
            findings.append(broken.finding)
    findings += _check_places(infos, size - 8 - length, name, whole=not findings)
    return infos, findings


def _short(size: int, length: int) -> str:
    """Say why the first bytes are no header."""
    if length < 0:
        return f"is truncated: {size} bytes, and a header alone takes 8 and more"
    return f"is truncated or no safetensors file: its header claims {length} bytes, the file has {size - 8} after the 8"


def _parse(text: bytes, name: str) -> list[tuple[str, object]]:
    """The entries of the header, in order, doubles included."""
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError) as error:
        raise Broken.at(name, f"its header is not JSON ({error}); the file is damaged or no safetensors file") from None
    if not isinstance(entries, list) or not all(isinstance(entry, tuple) for entry in entries):
        raise Broken.at(name, "its header is not a JSON object; the file is damaged or no safetensors file")
    return entries


def _info(key: str, entry: object, file: str) -> TensorInfo:
    """One entry of the header as data."""
    fields = dict(entry) if isinstance(entry, list) and all(isinstance(pair, tuple) for pair in entry) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise Broken.at(file, f"its header entry is {fields or entry!r}; dtype, shape and two data_offsets belong", key)
    if dtype not in DTYPES:
        raise Broken.at(file, f"has dtype {dtype}, which is not read; one of {', '.join(DTYPES)} is", key)
    start, end = offsets
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if end - start != wanted:
        raise Broken.at(
            file, f"{dtype} {shape} needs {wanted} bytes, but data_offsets {offsets} span {end - start}", key
        )
    return TensorInfo(key, dtype, tuple(shape), file, start, wanted)


def _naturals(value: object) -> TypeGuard[list[int]]:
    """Whether this is a list of whole numbers from 0 up that 64 bits hold (JSON's true is none)."""
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _check_places(infos: dict[str, TensorInfo], size: int, file: str, *, whole: bool) -> list[Finding]:
    """Check that the tensors lie one after the other and fill the file; gaps are known only of a `whole` header."""
    end = 0
    last = ""
    for info in sorted(infos.values(), key=lambda info: (info.start, info.nbytes)):
        if info.start < end:
            message = f"overlaps with {last} in the file: it starts at byte {info.start}, the other ends at {end}"
            return [Finding("error", file, info.name, message)]
        if whole and info.start > end:
            return [Finding("error", file, info.name, f"starts at byte {info.start}, after a gap that begins at {end}")]
        end, last = info.start + info.nbytes, info.name
    if end > size:
        return [Finding("error", file, last, f"is truncated: it ends at byte {end} of the data, the file holds {size}")]
    if whole and end < size:
        return [Finding("error", file, "", f"holds {size} bytes of data, its header accounts for {end}")]
    return []
