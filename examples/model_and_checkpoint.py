"""The README's model and checkpoint: ``python examples/model_and_checkpoint.py [FOLDER]``, about two minutes on a CPU.

Converts SmolLM2-135M in memory; writes it as a bf16 checkpoint, converts that file by file, inspects and loads it; then
damages a copy and inspects that.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fp8ref
from fp8ref.report.model import load_model


def inspect(folder: Path) -> None:
    """Run the command, and show its head and its last lines."""
    print(f"$ fp8ref inspect {folder.name}")
    command = [sys.executable, "-m", "fp8ref", "inspect", folder.name]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    lines = done.stdout.rstrip().splitlines()
    print("\n".join([*lines[:9], " ...", *lines[-5:], f"(exit status {done.returncode})", ""]))


def damage(folder: Path) -> None:
    """Put four faults of real checkpoints into the file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.mlp.up_proj.weight"].view(torch.uint8)[7, 100] = 0x7F
    tensors["model.layers.9.self_attn.q_proj.weight_scale"][2, 0] = -1
    short = tensors["model.layers.12.mlp.down_proj.weight_scale"][:4].clone()
    tensors["model.layers.12.mlp.down_proj.weight_scale"] = short
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    save_file(tensors, file, metadata={"format": "pt"})


def write_bf16(module: Any, folder: Path) -> None:
    """Write a model that came from a GGUF file, which transformers refuses as it is, as a plain one in bf16."""
    config = copy.deepcopy(module.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    plain.load_state_dict(module.state_dict())
    plain.save_pretrained(folder)


def main() -> None:
    """Do all of it in FOLDER, or in a temporary one."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    loaded = load_model(None)
    source, target, broken = (folder / name for name in ("SmolLM2-135M", "SmolLM2-135M-FP8", "broken"))
    write_bf16(loaded.module, source)
    fp8ref.convert_(loaded.module, "row", backend="emulate")
    print()
    fp8ref.convert_checkpoint(source, target, "block", overwrite=True)
    inspect(target)
    model = fp8ref.load_checkpoint(target, backend="emulate")
    print(model.model.layers[0].mlp.up_proj)
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    print(loaded.tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0]))
    shutil.copytree(target, broken, dirs_exist_ok=True)
    damage(broken)
    inspect(broken)


if __name__ == "__main__":
    main()
