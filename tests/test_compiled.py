"""Kernels that other tests run in Triton's interpreter also compile for a GPU; none is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = """
import inspect
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from carlreg.fast.kernels import descent

found = {}
for kernel in (descent._moments, descent._moments_backward):
    for board, stride in ((0, (2, 2, 2)), (1, (1, 2, 2))):
        constants = dict(zip(("KZ", "KY", "KX"), stride), QZ=8, QY=8, QX=8, BOARD=board, LANES=128)
        types = {"active": "*u8", **dict.fromkeys(("source", "target", "positions", "out", "by_moments"), "*fp32")}
        types |= dict.fromkeys(constants, "constexpr")
        names = inspect.signature(kernel.fn).parameters
        source = ASTSource(kernel, {name: types.get(name, "i32") for name in names}, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        found[f"{kernel.fn.__name__} {board}"] = len(compiled.asm["cubin"])
print(json.dumps(found))
"""


def test_the_kernels_of_local_correlation_compile_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    assert len(sizes) == 4
    assert min(sizes.values()) > 1000
