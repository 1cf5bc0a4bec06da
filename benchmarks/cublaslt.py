"""Asks cuBLASLt itself which algorithm it would take for a call of ``torch._scaled_mm``: by ctypes, on the host alone.

The descriptors are those of torch 2.11 (``at::cuda::blas::scaled_gemm`` and the ``cublasCommonArgs`` before it): a
row-major product is the column-major product of the operands swapped, so cuBLASLt's m is N and its n is M; no alignment
preference, the workspace of torch, and C has the bias's type (fp16 where there is none and the output is fp8). Numbers
of enumerators are those of cublasLt.h; :func:`check_header` compares them with the header beside the library.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

TYPES = {"fp32": 0, "fp16": 2, "bf16": 14, "e4m3": 28, "e5m2": 29}
SCALE_MODES = {"tensor": 0, "row": 3, "1x128": 4, "128x128": 5}
DESC = {
    "TRANSA": 3,
    "TRANSB": 4,
    "EPILOGUE": 7,
    "BIAS_POINTER": 8,
    "A_SCALE_POINTER": 17,
    "B_SCALE_POINTER": 18,
    "FAST_ACCUM": 25,
    "BIAS_DATA_TYPE": 26,
    "A_SCALE_MODE": 31,
    "B_SCALE_MODE": 32,
}
ALGO = {
    "ID": 0,
    "TILE_ID": 1,
    "SPLITK_NUM": 2,
    "REDUCTION_SCHEME": 3,
    "CTA_SWIZZLING": 4,
    "CUSTOM_OPTION": 5,
    "STAGES_ID": 6,
    "INNER_SHAPE_ID": 7,
    "CLUSTER_SHAPE_ID": 8,
}
FIELDS = tuple(ALGO)


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def library_path() -> str:
    """The cuBLASLt that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcublasLt.so" in line:
            return line.split()[-1]
    raise RuntimeError("libcublasLt is not loaded: call torch._scaled_mm on the GPU first")


def torch_workspace() -> int:
    """Bytes of workspace that torch offers cuBLASLt, asked of torch's own function."""
    lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    size = getattr(lib, "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv", None)
    if size is None:
        print("torch does not tell its workspace: 1 MiB is taken")
        return 2**20
    size.restype = c_size_t
    return int(size())


def check_header(path: str) -> list[str]:
    """Enumerators whose number in cublasLt.h is not the one used here; a note where there is no header."""
    headers = [p for up in list(Path(path).parents)[:4] for p in up.glob("include/cublasLt.h")]
    if not headers:
        return ["no cublasLt.h beside the library: the numbers are unchecked"]
    text = headers[0].read_text(errors="replace")
    wanted = {f"CUBLASLT_MATMUL_DESC_{k}": v for k, v in DESC.items()}
    wanted |= {f"CUBLASLT_ALGO_CONFIG_{k}": v for k, v in ALGO.items()}
    names = {"tensor": "SCALAR_32F", "row": "OUTER_VEC_32F", "1x128": "VEC128_32F", "128x128": "BLK128x128_32F"}
    wanted |= {f"CUBLASLT_MATMUL_MATRIX_SCALE_{names[k]}": v for k, v in SCALE_MODES.items()}
    wanted |= {"CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": 1, "CUBLASLT_EPILOGUE_BIAS": 4}
    wrong = []
    for name, value in wanted.items():
        found = re.search(rf"\b{name}\s*=\s*(\d+)", text)
        if found is None or int(found[1]) != value:
            wrong.append(f"{name}: used {value}, the header says {found[1] if found else 'nothing'}")
    return wrong


class Query:
    """One kind of call: output type, accumulation, scales, bias, operand types; asked about one shape after another."""

    def __init__(
        self,
        out: str = "bf16",
        fast: bool = True,
        scaling: tuple[str, str] = ("tensor", "tensor"),
        bias: bool = False,
        operands: tuple[str, str] = ("e4m3", "e4m3"),
        workspace: int | None = None,
    ) -> None:
        """``scaling`` and ``operands`` are those of torch's a and b; cuBLASLt sees them swapped."""
        self.lib = ctypes.CDLL(library_path())
        self.handle = c_void_p(torch.cuda.current_blas_handle())
        self.out, self.operands = out, operands
        self.c_type = TYPES[out] if out not in ("e4m3", "e5m2") else TYPES["bf16" if bias else "fp16"]
        self.workspace = torch_workspace() if workspace is None else workspace
        self.scale = torch.ones(1 << 20, device="cuda")
        self.bias = torch.zeros(1 << 16, device="cuda", dtype=torch.float16 if out == "fp16" else torch.bfloat16)
        self.desc, self.pref = c_void_p(), c_void_p()
        self._check("MatmulDescCreate", byref(self.desc), 68, 0)
        self._set("TRANSA", c_int32(1))
        self._set("TRANSB", c_int32(0))
        self._set("A_SCALE_POINTER", c_void_p(self.scale.data_ptr()))
        self._set("B_SCALE_POINTER", c_void_p(self.scale.data_ptr()))
        self._set("FAST_ACCUM", c_int8(fast))
        if bias:
            self._set("BIAS_POINTER", c_void_p(self.bias.data_ptr()))
            self._set("EPILOGUE", c_int32(4))
            self._set("BIAS_DATA_TYPE", c_int32(TYPES["fp16" if out == "fp16" else "bf16"]))
        self._set("A_SCALE_MODE", c_int32(SCALE_MODES[scaling[1]]))
        self._set("B_SCALE_MODE", c_int32(SCALE_MODES[scaling[0]]))
        self._check("MatmulPreferenceCreate", byref(self.pref))
        size = c_uint64(self.workspace)
        self._check("MatmulPreferenceSetAttribute", self.pref, 1, byref(size), c_size_t(8))
        self.algos: dict[bytes, tuple[int, ...]] = {}
        self.results = (Result * 32)()
        self.count = c_int(0)

    def _check(self, name: str, *args: Any) -> None:
        status = getattr(self.lib, "cublasLt" + name)(*args)
        if status != 0:
            raise RuntimeError(f"cublasLt{name}{args} returned status {status}")

    def _set(self, name: str, value: Any) -> None:
        self._check("MatmulDescSetAttribute", self.desc, DESC[name], byref(value), c_size_t(ctypes.sizeof(value)))

    def _attributes(self, result: Result) -> tuple[int, ...]:
        """Every configuration attribute of an algorithm, in the order of FIELDS; -1 where the library has none."""
        key = bytes(result.algo)
        if key not in self.algos:
            values = []
            for number in ALGO.values():
                value, written = c_uint64(0), c_size_t(0)
                for size in (4, 2):
                    get = self.lib.cublasLtMatmulAlgoConfigGetAttribute
                    status = get(byref(result.algo), number, byref(value), c_size_t(size), byref(written))
                    if status == 0:
                        break
                values.append(int(value.value) if status == 0 else -1)
            self.algos[key] = tuple(values)
        return self.algos[key]

    def ask(self, m: int, n: int, k: int, wanted: int = 1) -> tuple[int, list[tuple[Any, ...]]]:
        """Status and the algorithms for a [m, k] by [k, n] product, each as (attributes, workspace, waves)."""
        lib, layouts = self.lib, [c_void_p() for _ in range(4)]
        kinds = (TYPES[self.operands[1]], TYPES[self.operands[0]], self.c_type, TYPES[self.out])
        for layout, kind, rows, columns in zip(layouts, kinds, (k, k, n, n), (n, m, m, m), strict=True):
            lib.cublasLtMatrixLayoutCreate(byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(rows))
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.desc, *layouts, self.pref, wanted, self.results, byref(self.count)
        )
        for layout in layouts:
            lib.cublasLtMatrixLayoutDestroy(layout)
        if status != 0:
            return status, []
        found = self.results[: self.count.value]
        return 0, [(self._attributes(r), r.workspace, r.waves) for r in found]
