"""Compiles the Triton kernels ahead of time, which needs no GPU, and prints a JSON line for each: a thread's registers
and stack, and shared memory. Arguments: head sizes, and after "at" compute capabilities, such as 64 128 at 80 90.
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from titans_hf.memory_triton import chunk_gradients_kernel, chunk_states_kernel, tile, token_kernel

CHUNK = 64
# The arguments that are None in a memory of one layer, by the chunk rule, and without an anchor.
HIDDEN_LAYER = {"grad_activations", "curvatures", "grad_hidden_deltas"}
HIDDEN_LAYER |= {f"{x}{y}_1" for x in ("", "grad_", "new_") for y in ("weights", "momentum", "anchor")} | {"target_1"}
DELTA_RULE = {"system", "inverse"}
ANCHOR = {"anchor", "anchor_2", "grad_anchor_2", "new_anchor_2"}
# Arguments of the second kernel that are scratch in the first.
OF_GRADIENTS = {"slopes": HIDDEN_LAYER, "deltas": DELTA_RULE, "errors": ANCHOR}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Depth, and whether the delta rule takes the last layer's errors; all with momentum and forgetting.
FORMS = {"two layers": (2, True), "two layers, chunk rule": (2, False), "one layer": (1, True)}


def absent_arguments(kernel, depth: int, delta_rule: bool) -> set[str]:
    """Returns the arguments of a kernel that are None in a form of the memory."""
    groups = [HIDDEN_LAYER] * (depth == 1) + [DELTA_RULE] * (not delta_rule)
    groups += [ANCHOR] * (depth == 1 and delta_rule)
    absent = set().union(*groups)
    if kernel is chunk_gradients_kernel:
        absent |= {name for name, group in OF_GRADIENTS.items() if group in groups}
    return absent


def compile_kernel(kernel, head_dim: int, capability: int, form: tuple[int, bool]) -> dict[str, int]:
    """Compiles a kernel for a memory whose hidden layer is as wide as a head, with TF32 products."""
    absent, warps = absent_arguments(kernel, *form), tile(head_dim)
    constants = dict(C=CHUNK, D=head_dim, F=head_dim, BLOCK=warps.pop("BLOCK"), PRECISION="tf32")
    constants |= dict(LEVELS=CHUNK.bit_length() - 1, DELTA_RULE=form[1], HIDDEN_STEP=1 / 128)
    constants |= dict(CHUNK=CHUNK, HEADS=16, CLIP=1.0)
    constants |= dict.fromkeys(absent)
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        number = {"num_chunks": "i32", "num_rows": "i32", "num_seen": "*i64"}.get(name, "*fp32")
        signature[name] = "constexpr" if name in constants else number
        if signature[name].startswith("*"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    constants = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    source, target = ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=dict(**warps, num_stages=1))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return dict(registers=int(registers), stack=int(stack), shared=compiled.metadata.shared)


if __name__ == "__main__":
    at = sys.argv.index("at")
    sizes, capabilities = map(int, sys.argv[1:at]), map(int, sys.argv[at + 1 :])
    for size, capability, (name, form) in product(sizes, capabilities, FORMS.items()):
        for kernel in (chunk_states_kernel, chunk_gradients_kernel, token_kernel):
            found = compile_kernel(kernel, size, capability, form)
            which = dict(kernel=kernel.__name__, head_dim=size, capability=capability, form=name)
            print(json.dumps(which | found), flush=True)
