"""Tensor parallelism by Transformers' plans: every rank has whole heads of the memory and of attention.

Memory heads are independent of each other, so the projections, convolutions, gates, learned weights and state of a head
are on the same rank. The styles of Transformers split linear layers; those registered here split the other parameters.
"""

import contextlib

import torch
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def tensor_parallel_plan(config) -> dict[str, str]:
    """Returns the tensor parallel style of each module of a `TitansModel`."""
    mixer, mlp = "layers.*.mixer", "layers.*.mlp"
    plan, columns, rows, shared = {mixer: "titans_whole_heads"}, [], [], []
    plan[f"{mixer}.memory.initial_weights"] = "titans_heads"
    columns += [f"{mixer}.memory.{name}" for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "inner_lr")]
    rows, shared = [f"{mixer}.memory.o_proj"], [f"{mixer}.memory.norm"]
    for name, exists in (("momentum", config.memory_momentum), ("forget", config.memory_forget)):
        columns += [f"{mixer}.memory.{name}"] * exists
    if config.memory_conv_kernel > 1:
        plan |= {f"{mixer}.memory.{part}_conv": "titans_heads" for part in "qkv"}
    if config.variant == "mac":
        columns, rows = [*columns, f"{mixer}.recall.q_proj"], [*rows, f"{mixer}.recall.o_proj"]
        shared.append(f"{mixer}.recall.norm")
    if config.variant != "lmm":
        columns += [f"{mixer}.attention.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        rows.append(f"{mixer}.attention.o_proj")
    columns += [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    rows.append(f"{mlp}.down_proj")
    styles = (("colwise", columns), ("rowwise", rows), ("titans_shared_by_heads", shared))
    return plan | {name: style for style, names in styles for name in names}


class WholeHeads(TensorParallelLayer):
    """Raises ValueError unless the numbers of heads of a mixer are multiples of the number of ranks."""

    def install_forward(self, module, mesh):
        names = ["memory_num_heads"] + ["num_key_value_heads"] * (module.config.variant != "lmm")
        for name in names:
            if (heads := getattr(module.config, name)) % mesh.size():
                raise ValueError(f"`{name}` ({heads}) must be a multiple of the tensor parallel size ({mesh.size()}).")
        return module


class Heads(TensorParallelLayer):
    """Splits parameters along their first dimension, which is ordered by heads."""

    def shard_param(self, module, param, mesh):
        whole = module._parameters[param]
        part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = torch.nn.Parameter(part, requires_grad=whole.requires_grad)

    def should_use_local_tensors(self, module):
        return True


class SharedByHeads(TensorParallelLayer):
    """Replicates parameters that all heads use. Their gradient is summed over the ranks, and thus over the heads, at
    each use: summing the accumulated gradient, as `replicated_with_grad_allreduce` does, counts the first of several
    backward passes twice.
    """

    @contextlib.contextmanager
    def context_around_forward(self, module, mesh):
        own = dict(module._parameters)
        for name, parameter in own.items():
            everywhere = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
            module._parameters[name] = everywhere.to_local(grad_placements=[Partial()])
        try:
            yield
        finally:
            module._parameters.update(own)


if torch.distributed.is_available():
    ALL_PARALLEL_STYLES.register("titans_whole_heads", WholeHeads())
    ALL_PARALLEL_STYLES.register("titans_heads", Heads())
    ALL_PARALLEL_STYLES.register("titans_shared_by_heads", SharedByHeads())
