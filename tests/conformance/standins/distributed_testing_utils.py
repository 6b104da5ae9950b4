"""Stands in for the starting of ranks, which the source distribution lacks: gloo on the CPU."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    """Ranks share the CPU."""


def _start_rank_processes(function, args: tuple, nprocs: int) -> None:
    """Calls function(rank, *args) in one new process per rank; raises what one of them raises."""
    mp.spawn(function, args=args, nprocs=nprocs)


def run_distributed(world_size: int):
    """run_distributed(n)(function)(*args) calls function(rank, *args) on n ranks of one process group."""

    def wrap(function):
        def run(*args):
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            _start_rank_processes(_call_on_rank, (function, args, world_size, store.port), world_size)

        return run

    return wrap


def _call_on_rank(rank: int, function, args: tuple, world_size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", store=dist.TCPStore("localhost", port), rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
