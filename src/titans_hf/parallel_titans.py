"""The tensor parallel styles that a Titans model adds to Transformers', for `base_model_tp_plan` of `TitansConfig`."""

import contextlib

import torch
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


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


def register_parallel_styles() -> None:
    """Registers the styles with Transformers, where PyTorch has been built with `torch.distributed`."""
    if torch.distributed.is_available():
        ALL_PARALLEL_STYLES.register("titans_whole_heads", WholeHeads())
        ALL_PARALLEL_STYLES.register("titans_heads", Heads())
        ALL_PARALLEL_STYLES.register("titans_shared_by_heads", SharedByHeads())
